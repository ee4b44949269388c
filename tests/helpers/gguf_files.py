"""Tiny GGUF files of random transformers models, written as llama.cpp's converter would, with the package gguf.

Names of tensors and keys come from that package's own tables, so that they say something about ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar

import gguf
import numpy as np
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from tokenizers import pre_tokenizers
from transformers import PreTrainedModel

Kind: TypeAlias = GGMLQuantizationType
Model = TypeVar("Model", bound=PreTrainedModel)
Edit: TypeAlias = Callable[[gguf.GGUFWriter], None]
Packed: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.uint8]]"
Array: TypeAlias = "np.ndarray[tuple[int, ...], np.dtype[np.float32]]"
PERMUTED = ("llama", "mistral", "mistral3")  # rows of Q and K in rotary pairs
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6


@dataclass(kw_only=True)
class TinyVocabulary:
    """What goes under tokenizer.ggml.*; every list may be broken by a test."""

    model: str = "gpt2"
    pre: str | None = "smollm"
    tokens: list[str] = field(default_factory=list)
    types: list[int] = field(default_factory=list)
    scores: list[float] | None = None
    merges: list[str] | None = None
    ids: dict[str, int] = field(default_factory=dict)  # bos, eos, unknown, padding, ...
    flags: dict[str, bool] = field(default_factory=dict)  # add_bos_token, ...
    template: str | None = None

    def write(self, writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model(self.model)
        if self.pre is not None:
            writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(self.tokens)
        if self.types:
            writer.add_token_types(self.types)
        if self.scores is not None:
            writer.add_token_scores(self.scores)
        if self.merges is not None:
            writer.add_token_merges(self.merges)
        for name, index in self.ids.items():
            writer.add_uint32(f"tokenizer.ggml.{name}_token_id", index)
        for name, value in self.flags.items():
            writer.add_bool(f"tokenizer.ggml.{name}", value)
        if self.template is not None:
            writer.add_chat_template(self.template)


def byte_level_vocabulary(size: int = 0, *, pre: str = "smollm") -> TinyVocabulary:
    """Two control tokens, the 256 bytes, some merges, filled up with unused tokens to `size`."""
    merges = ["h i", "Ġ t", "h e", "Ġt he", "Ġ Ġ", "1 2", "12 3", "i n", "in g"]
    tokens = ["<|end|>", "<|start|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += [merge.replace(" ", "") for merge in merges]
    fill = [f"[PAD{index}]" for index in range(len(tokens), size)]
    types = [CONTROL] * 2 + [NORMAL] * (len(tokens) - 2) + [UNUSED] * len(fill)
    return TinyVocabulary(pre=pre, tokens=tokens + fill, types=types, merges=merges, ids={"bos": 1, "eos": 0})


def write_gguf_of(
    path: Path,
    model: PreTrainedModel,
    *,
    architecture: str,
    kind: Kind = GGMLQuantizationType.F32,
    vocabulary: TinyVocabulary | None = None,
    edit: Edit | None = None,
) -> Path:
    """A file of this model; `kind` is the type of its matrices. `edit` may add keys and tensors of its own."""
    writer = gguf.GGUFWriter(path, architecture)
    _add_sizes(writer, model)
    (vocabulary or byte_level_vocabulary(model.config.vocab_size)).write(writer)
    if edit is not None:
        edit(writer)
    _add_tensors(writer, model, architecture, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_sizes(writer: gguf.GGUFWriter, model: PreTrainedModel) -> None:
    config = model.config
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_vocab_size(config.vocab_size)


def _add_tensors(writer: gguf.GGUFWriter, model: PreTrainedModel, architecture: str, kind: Kind) -> None:
    config = model.config
    known = {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3, "mistral3": gguf.MODEL_ARCH.MISTRAL3}
    table = gguf.get_tensor_name_map(known.get(architecture, gguf.MODEL_ARCH.LLAMA), config.num_hidden_layers)
    for name, parameter in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = parameter.float().numpy()
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
        if heads is not None and architecture in PERMUTED:
            values = rotary_pairs(values, heads)
        stored = kind if values.ndim > 1 else GGMLQuantizationType.F32
        short = table.get_name(name, try_suffixes=(".weight", ".bias"))
        assert short is not None, name
        writer.add_tensor(short, quantise(np.ascontiguousarray(values), stored), raw_dtype=stored)


def rotary_pairs(values: Array, heads: int) -> Array:
    """Row by row: the halves of each head become neighbouring pairs."""
    half = values.shape[0] // heads // 2
    order = [head * 2 * half + part * half + i for head in range(heads) for i in range(half) for part in range(2)]
    return values[order]


def quantise(values: Array, kind: Kind) -> np.ndarray[tuple[int, ...], np.dtype[np.generic]]:
    """Packed rows; the K types, which the package gguf cannot write, are encoded here."""
    encode = {"Q4_K": _encode_q4_k, "Q5_K": _encode_q5_k, "Q6_K": _encode_q6_k}.get(kind.name)
    if encode is None:
        return gguf.quantize(values, kind)
    block_size, block_bytes = GGML_QUANT_SIZES[kind]
    blocks = values.reshape(-1, block_size)
    packed = b"".join(encode(block) for block in blocks)
    return np.frombuffer(packed, np.uint8).reshape(*values.shape[:-1], values.shape[-1] // block_size * block_bytes)


def _encode_q4_k(block: Array) -> bytes:
    numbers, head = _k_numbers(block, 4)
    return head + _nibbles_of(numbers).tobytes()


def _encode_q5_k(block: Array) -> bytes:
    numbers, head = _k_numbers(block, 5)
    fifth = np.zeros(32, np.uint8)
    for run in range(8):
        fifth |= (numbers[run * 32 : run * 32 + 32] >> 4 << run).astype(np.uint8)
    return head + fifth.tobytes() + _nibbles_of((numbers & 15).astype(np.uint8)).tobytes()


def _k_numbers(block: Array, bits: int) -> tuple[Packed, bytes]:
    """(numbers of all runs, the 16 bytes of scales before them)."""
    runs = block.reshape(8, 32)
    least = np.maximum(-runs.min(1), 0)
    steps = (runs.max(1) + least).clip(1e-9) / (2**bits - 1)
    scale, scale_of_least = np.float16(steps.max() / 63), np.float16(max(float(least.max()), 1e-6) / 63)
    run_scales = np.round(steps / np.float64(scale)).clip(1, 63).astype(int)
    run_least = np.round(least / np.float64(scale_of_least)).clip(0, 63).astype(int)
    shifted = runs + (np.float64(scale_of_least) * run_least)[:, None]
    numbers = np.round(shifted / (np.float64(scale) * run_scales)[:, None]).clip(0, 2**bits - 1)
    head = np.array([scale, scale_of_least], np.float16).tobytes() + _six_bits_of(run_scales, run_least)
    return numbers.astype(np.uint8).ravel(), head


def _six_bits_of(scales: Sequence[int], least: Sequence[int]) -> bytes:
    packed = [0] * 12
    for run in range(4):
        packed[run] = scales[run] | scales[run + 4] >> 4 << 6
        packed[run + 4] = least[run] | least[run + 4] >> 4 << 6
        packed[run + 8] = scales[run + 4] & 15 | (least[run + 4] & 15) << 4
    return bytes(packed)


def _nibbles_of(numbers: Packed) -> Packed:
    pairs = numbers.reshape(4, 2, 32).astype(np.uint8)
    return (pairs[:, 0] | pairs[:, 1] << 4).astype(np.uint8)


def _encode_q6_k(block: Array) -> bytes:
    runs = block.reshape(16, 16)
    steps = np.abs(runs).max(1).clip(1e-9) / 31
    scale = np.float16(steps.max() / 127)
    run_scales = np.ceil(steps / np.float64(scale)).clip(1, 127).astype(np.int8)
    numbers = (np.round(runs / (np.float64(scale) * run_scales)[:, None]).clip(-32, 31) + 32).astype(np.uint8)
    halves = numbers.reshape(2, 4, 32)  # half, quarter, place
    low = np.concatenate([np.stack([half[0] & 15 | half[2] << 4, half[1] & 15 | half[3] << 4]) for half in halves])
    high = np.stack([half[0] >> 4 | half[1] >> 4 << 2 | half[2] >> 4 << 4 | half[3] >> 4 << 6 for half in halves])
    parts: list[bytes] = [(low & 255).astype(np.uint8).tobytes(), high.tobytes(), run_scales.tobytes(), scale.tobytes()]
    return b"".join(parts)


def randomise(model: Model, seed: int = 5) -> Model:
    """Weights large enough that every layer shows in the logits, biases and norms included."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            scale = 0.2 if parameter.dim() > 1 else 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    model.train(False)
    return model
