"""GGUF metadata -> the form of Hugging Face's config.json, and GGUF tensor names -> Hugging Face's. Llama only."""

from __future__ import annotations

import math
import re
import struct
from typing import TYPE_CHECKING

from tokenyard.errors import ModelLoadError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tokenyard.model.gguf_reader import GGUFHeader, GGUFTensor, GGUFValue

ROPE_FREQUENCIES = "rope_freqs.weight"  # divisors of Llama 3's RoPE frequencies; becomes config, not a weight
_TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d{1,4})\.(\w+)\.(weight|bias)")
_SCALING_KEYS = frozenset({"type", "factor", "original_context_length", "finetuned"})
# Llama 3's RoPE scaling is not in the metadata: the converter writes only the divisors that follow from these.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def config_from_gguf(header: GGUFHeader) -> tuple[dict[str, object], dict[str, object]]:
    """(config, generation_config) of a GGUF file; ModelLoadError for an architecture or feature not supported."""
    keys = _Metadata(header)
    architecture = keys.text("general.architecture")
    if architecture != "llama":
        raise ModelLoadError(
            f"{header.path}: GGUF files of architecture {architecture!r} are not available in this version; allowed: "
            "llama. Give the model's safetensors folder instead"
        )
    _refuse_unsupported(keys)
    names = hf_names(header)  # refuses tensors that would not be loaded
    config = _sizes(keys) | _token_ids(keys)
    _check_layers(header, names, config["num_hidden_layers"])
    config |= {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "dtype": _dtype(header),
    }
    if scaling := _rope_scaling(keys, config):
        config["rope_scaling"] = scaling
    eos = [keys.number(f"tokenizer.ggml.{kind}_token_id", None) for kind in ("eos", "eot")]
    eos_ids = list(dict.fromkeys(int(item) for item in eos if item is not None))
    return config, {"eos_token_id": eos_ids} if eos_ids else {}


def hf_names(header: GGUFHeader) -> dict[str, GGUFTensor]:
    """Hugging Face parameter name -> tensor of the file; a tensor without a counterpart is refused by name."""
    names: dict[str, GGUFTensor] = {}
    for name, tensor in header.tensors.items():
        if name == ROPE_FREQUENCIES:
            continue
        hf_name = _TOP_NAMES.get(name) or _layer_name(name)
        if hf_name is None:
            raise ModelLoadError(f"{header.path}: tensor {name!r} has no place in a Llama; this file is not supported")
        names[hf_name] = tensor
    return names


def _check_layers(header: GGUFHeader, names: Iterable[str], declared: object) -> None:
    layers = {name.split(".")[2] for name in names if name.startswith("model.layers.")}
    if declared != len(layers):
        raise ModelLoadError(
            f"{header.path}: {declared} layers are declared and {len(layers)} are in the file; is it only a part?"
        )


class _Metadata:
    """Typed look-ups with errors that name the key."""

    def __init__(self, header: GGUFHeader) -> None:
        self.header = header

    def get(self, key: str) -> GGUFValue | None:
        return self.header.metadata.get(key)

    def text(self, key: str) -> str:
        value = self.get(key)
        if not isinstance(value, str):
            raise self._wrong(key, "text")
        return value

    def number(self, key: str, default: int | float | None) -> int | float | None:
        value = self.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
            raise self._wrong(key, "a number")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        value = self.number(key, default)
        if not isinstance(value, int) or value < 1:
            raise self._wrong(key, "a whole number above 0")
        return value

    def _wrong(self, key: str, expected: str) -> ModelLoadError:
        given = repr(self.get(key))[:60]
        return ModelLoadError(f"{self.header.path}: key {key!r} is {given}; {expected} is expected")


def _sizes(keys: _Metadata) -> dict[str, object]:
    embedding = keys.header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelLoadError(f"{keys.header.path}: no embedding (tensor 'token_embd.weight' with two dimensions)")
    hidden_size = keys.count("llama.embedding_length")
    num_heads = keys.count("llama.attention.head_count")
    if embedding.shape[1] != hidden_size:
        raise ModelLoadError(f"{keys.header.path}: embedding is {embedding.shape}, hidden size is {hidden_size}")
    return {
        "hidden_size": hidden_size,
        "intermediate_size": keys.count("llama.feed_forward_length"),
        "num_hidden_layers": keys.count("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": keys.count("llama.attention.head_count_kv", num_heads),
        "head_dim": keys.count("llama.attention.key_length", hidden_size // num_heads),
        "rms_norm_eps": _shortest(keys.number("llama.attention.layer_norm_rms_epsilon", 1e-6)),
        "rope_theta": _shortest(keys.number("llama.rope.freq_base", 10000.0)),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": keys.count("llama.context_length"),
    }


def _token_ids(keys: _Metadata) -> dict[str, object]:
    kinds = {"bos": "bos", "eos": "eos", "pad": "padding"}
    ids = {kind: keys.number(f"tokenizer.ggml.{name}_token_id", None) for kind, name in kinds.items()}
    return {f"{kind}_token_id": int(value) for kind, value in ids.items() if value is not None}


def _refuse_unsupported(keys: _Metadata) -> None:
    hidden_size, num_heads = keys.count("llama.embedding_length"), keys.count("llama.attention.head_count")
    head_dim = keys.count("llama.attention.key_length", hidden_size // num_heads)
    reasons = {
        "a mixture of experts": keys.number("llama.expert_count", 0) != 0,
        "rotary embedding of a part of each head": keys.number("llama.rope.dimension_count", head_dim) != head_dim,
        "values of another size than keys": keys.number("llama.attention.value_length", head_dim) != head_dim,
        "a sliding window": keys.number("llama.attention.sliding_window", 0) != 0,
    }
    for reason, holds in reasons.items():
        if holds:
            raise ModelLoadError(f"{keys.header.path}: {reason} is not available for GGUF files; give safetensors")


def _rope_scaling(keys: _Metadata, config: dict[str, object]) -> dict[str, object] | None:
    if (divisors := keys.header.tensors.get(ROPE_FREQUENCIES)) is not None:
        return _llama3_scaling(keys.header, divisors, config)
    prefix = "llama.rope.scaling."
    given = {key.removeprefix(prefix) for key in keys.header.metadata if key.startswith(prefix)}
    kind = keys.text(prefix + "type") if "type" in given else "none"
    if kind == "none":
        return None
    if kind not in {"linear", "yarn"} or not given <= _SCALING_KEYS:
        raise ModelLoadError(
            f"{keys.header.path}: RoPE scaling {kind!r} with {sorted(given)} is not available for GGUF files; allowed: "
            f"linear and yarn with {sorted(_SCALING_KEYS)}"
        )
    scaling: dict[str, object] = {"rope_type": kind, "factor": _shortest(keys.number(prefix + "factor", 1.0))}
    if "original_context_length" in given:
        scaling["original_max_position_embeddings"] = keys.count(prefix + "original_context_length")
    return scaling


def _llama3_scaling(header: GGUFHeader, tensor: GGUFTensor, config: dict[str, object]) -> dict[str, object]:
    head_dim, theta = config["head_dim"], config["rope_theta"]
    if tensor.type_name != "F32" or not isinstance(head_dim, int) or tensor.shape != (head_dim // 2,):
        raise ModelLoadError(f"{header.path}: tensor {tensor.name!r} is not one float32 per rotary frequency")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        divisors = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.num_bytes))
    factor = max(divisors)
    expected = [_llama3_divisor(float(str(theta)) ** (2 * i / head_dim), factor) for i in range(head_dim // 2)]
    if any(not math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, expected, strict=True)):
        raise ModelLoadError(f"{header.path}: tensor {tensor.name!r} is not a RoPE scaling of Llama 3; not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_ORIGINAL,
    }


def _llama3_divisor(inverse_frequency: float, factor: float) -> float:
    """How much Llama 3's scaling slows one rotary frequency down."""
    turns = _LLAMA3_ORIGINAL / (2 * math.pi * inverse_frequency)
    if turns > _LLAMA3_HIGH:
        return 1.0
    if turns < _LLAMA3_LOW:
        return factor
    smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _layer_name(name: str) -> str | None:
    match = _LAYER_TENSOR.fullmatch(name)
    if match is None or match[2] not in _LAYER_NAMES:
        return None
    return f"model.layers.{int(match[1])}.{_LAYER_NAMES[match[2]]}.{match[3]}"


def _dtype(header: GGUFHeader) -> str:
    """The dtype to compute in: the file's own where all matrices share one, else bfloat16 (quantised files)."""
    types = {tensor.type_name for tensor in header.tensors.values() if len(tensor.shape) > 1}
    return {frozenset({"F32"}): "float32", frozenset({"F16"}): "float16"}.get(frozenset(types), "bfloat16")


def _shortest(value: int | float | None) -> float:
    """The shortest decimal that is the same float32: 1e-05, where the file's float32 reads 9.999999747e-06."""
    number = float(value or 0.0)
    for digits in range(1, 10):
        short = float(f"{number:.{digits}g}")
        if struct.pack("<f", short) == struct.pack("<f", number):
            return short
    return number
