"""The model of the soak: small and random, with the default model's tokenizer; each token depends on all before it."""

from __future__ import annotations

import shutil
from pathlib import Path

MAX_LENGTH = 512
"""Prompt and output tokens."""
_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def write_model(folder: Path, tokenizer_from: Path) -> None:
    """A Llama of two layers in float32; its weights are wide, so that attention tells tokens far apart."""
    import torch
    from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    source = AutoConfig.from_pretrained(tokenizer_from)
    config = LlamaConfig(
        vocab_size=source.vocab_size,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=False,
        initializer_range=0.3,
        bos_token_id=source.bos_token_id,
        eos_token_id=source.eos_token_id,
        pad_token_id=source.pad_token_id,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for name in _TOKENIZER:
        if (tokenizer_from / name).exists():
            shutil.copy(tokenizer_from / name, folder / name)
