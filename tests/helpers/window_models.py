"""Tiny random models whose layers have sliding windows, and what transformers makes of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

WINDOW = 8
MAX_MODEL_LEN = 64
_BASE: dict[str, object] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": WINDOW,
    "max_position_embeddings": MAX_MODEL_LEN,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, dict[str, object]] = {
    "mistral": {"num_hidden_layers": 3},
    "qwen2": {"num_hidden_layers": 4, "use_sliding_window": True, "max_window_layers": 2},
    "gemma3_text": {"num_hidden_layers": 6, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]},
    "gpt_oss": {"num_hidden_layers": 4, "num_local_experts": 4, "num_experts_per_tok": 2},
}
"""Windows on all layers, on half of them, on five of six, on every other one with sinks."""


def write_window_model(folder: Path, family: str, tokenizer_from: Path) -> Path:
    """A model of a family with the tokenizer of another folder; its weights are large, so that attention matters."""
    torch.manual_seed(5)
    vocabulary = json.loads((tokenizer_from / "config.json").read_text())["vocab_size"]
    config = CONFIG_MAPPING[family].from_dict({**_BASE, **FAMILIES[family], "vocab_size": vocabulary})
    model = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


@cache
def _eager(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model


@torch.inference_mode()
def transformers_greedy(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """The most likely `count` tokens after a prompt, each from the whole sequence: no cache is involved."""
    tokens = list(prompt)
    for _ in range(count):
        logits = _eager(folder)(torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def prompt_of(length: int, seed: int) -> list[int]:
    """Token ids of a prompt."""
    random = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, 250, (length,), generator=random).tolist()
    return ids
