"""Tiny random models of the fast decoder's families, in the shapes that models come in, made with transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple, cast

import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

VOCAB = 272  # with room for the tiny tokenizer's
WINDOW = 8
ORIGINAL = 64  # max_position_embeddings


class Case(NamedTuple):
    """A model type, and what its config has beyond `_BASE`."""

    model_type: str
    extra: dict[str, object]


_BASE: dict[str, object] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "max_position_embeddings": ORIGINAL,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SLIDING = {"use_sliding_window": True, "sliding_window": WINDOW}
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 5e4}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 5e4,
}
_DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
_GRANITE: dict[str, object] = {
    "embedding_multiplier": 12.0,
    "attention_multiplier": 0.125,
    "residual_multiplier": 0.22,
    "logits_scaling": 8.0,
}
_ODD_HEADS = {"hidden_size": 36, "num_attention_heads": 9, "num_key_value_heads": 3}

CASES: dict[str, Case] = {
    "llama": Case("llama", {}),
    "llama with biases": Case("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, tied, 9 heads on 3": Case("llama", {**_ODD_HEADS, "head_dim": 8, "tie_word_embeddings": True}),
    "llama, llama3 rope": Case("llama", {"rope_parameters": _LLAMA3}),
    "llama, dynamic rope": Case("llama", {"rope_parameters": _DYNAMIC}),
    "mistral without windows": Case("mistral", {"sliding_window": None, "head_dim": 20}),
    "mistral with windows": Case("mistral", {"sliding_window": WINDOW}),
    "mistral, linear rope": Case(
        "mistral", {"sliding_window": 5, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    ),
    "qwen2": Case("qwen2", {}),
    "qwen2, tied, one KV head": Case("qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
    "qwen2, windows from layer 1 on": Case("qwen2", {**_SLIDING, "max_window_layers": 1}),
    "qwen2, windows by layer": Case(
        "qwen2", {**_SLIDING, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
    ),
    "qwen2, yarn rope": Case("qwen2", {"rope_parameters": _YARN}),
    "qwen3": Case("qwen3", {"head_dim": 20}),
    "qwen3, tied, 9 heads on 3": Case("qwen3", {**_ODD_HEADS, "head_dim": 16, "tie_word_embeddings": True}),
    "qwen3 with biases and windows": Case("qwen3", {**_SLIDING, "attention_bias": True, "max_window_layers": 2}),
    "qwen3, one KV head, yarn rope": Case("qwen3", {"num_key_value_heads": 1, "rope_parameters": _YARN}),
    "smollm3": Case("smollm3", {"no_rope_layer_interval": 2, "tie_word_embeddings": True}),
    "smollm3, layers named, with biases": Case(
        "smollm3", {"no_rope_layers": [0, 1, 1], "attention_bias": True, "mlp_bias": True}
    ),
    "smollm3 with windows": Case("smollm3", {**_SLIDING, "no_rope_layers": [1, 0, 1]}),
    "smollm3, llama3 rope": Case("smollm3", {"no_rope_layer_interval": 3, "rope_parameters": _LLAMA3}),
    "granite": Case("granite", _GRANITE),
    "granite, tied, with biases": Case(
        "granite", {**_GRANITE, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}
    ),
    "granite, dynamic rope": Case("granite", {**_GRANITE, "rope_parameters": _DYNAMIC}),
}


def make_model(case: str) -> PreTrainedModel:
    """A random model; its weights are large, so that attention matters, and its norms and biases are not the usual."""
    torch.manual_seed(11)
    model_type, extra = CASES[case]
    config = CONFIG_MAPPING[model_type].from_dict({**_BASE, **extra})
    model: PreTrainedModel = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.5 if parameter.dim() == 1 else 0.2)
    model.requires_grad_(False)
    return model


def write_model(folder: Path, case: str, tokenizer_from: Path) -> Path:
    """A folder with the model as transformers saves it and the tokenizer of another folder."""
    model = make_model(case)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer_from / name, folder / name)
    return folder


def saved_config(folder: Path) -> dict[str, object]:
    """The config.json of a folder."""
    config: dict[str, object] = json.loads((folder / "config.json").read_text())
    return config


@cache
def _loaded(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    return model


@torch.inference_mode()
def transformers_greedy(folder: Path, prompt: Sequence[int], count: int) -> list[int]:
    """What transformers generates after a prompt, with its own cache."""
    module = _loaded(folder)
    module(torch.tensor([[3]]), use_cache=False)  # a dynamic rotary table forgets the sequence before
    model = cast("transformers.GenerationMixin", module)
    tokens = torch.tensor([list(prompt)])
    generated = model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        do_sample=False,
        max_new_tokens=count,
        min_new_tokens=count,
        eos_token_id=None,
        pad_token_id=0,
    )
    ids: list[int] = generated[0, len(prompt) :].tolist()
    return ids


def prompt_of(length: int, seed: int) -> list[int]:
    """Token ids of a prompt."""
    random = torch.Generator().manual_seed(seed)
    ids: list[int] = torch.randint(3, VOCAB, (length,), generator=random).tolist()
    return ids
