"""RoPE scaling of a GGUF file in the form of Hugging Face's `rope_scaling`."""

from __future__ import annotations

import math
import struct
from typing import TYPE_CHECKING

from tokenyard.errors import ModelLoadError
from tokenyard.model.gguf_architectures import ROPE_FREQUENCIES

if TYPE_CHECKING:
    from tokenyard.model.gguf_metadata import Metadata
    from tokenyard.model.gguf_reader import GGUFHeader

# Key after `ARCHITECTURE.rope.scaling.` -> Hugging Face's. Converters write Hugging Face's numbers as they are.
_YARN_NUMBERS = {
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
_LOG_MULTIPLIER, _EXTRAPOLATION = "yarn_log_multiplier", "yarn_ext_factor"
_COMMON_KEYS = frozenset({"type", "factor", "original_context_length", "finetuned"})
_KEYS = {
    "none": _COMMON_KEYS,
    "linear": _COMMON_KEYS,
    "yarn": _COMMON_KEYS | _YARN_NUMBERS.keys() | {_LOG_MULTIPLIER, _EXTRAPOLATION},
}
# Llama 3's RoPE scaling is not in the metadata: converters write only the divisors that follow from these.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_ORIGINAL = 1.0, 4.0, 8192


def rope_scaling(
    header: GGUFHeader, keys: Metadata, prefix: str, *, head_dim: int, theta: float
) -> dict[str, object] | None:
    """`rope_scaling` of a config.json, or None; `prefix` is that of the architecture's keys, such as `llama.`."""
    given = set(keys.names(f"{prefix}rope.scaling."))
    if ROPE_FREQUENCIES in header.tensors:
        if given - {"finetuned"} and keys.text(f"{prefix}rope.scaling.type", "linear") != "none":
            raise keys.refuse(f"RoPE is scaled both by {ROPE_FREQUENCIES!r} and by metadata")
        return _llama3(header, head_dim=head_dim, theta=theta)
    # A factor without a type is linear, as in llama.cpp; `rope.scale_linear` is how old files spell it.
    old = f"{prefix}rope.scale_linear"
    has_factor = "factor" in given or keys.has(old)
    kind = keys.text(f"{prefix}rope.scaling.type", "linear" if has_factor else "none")
    if kind not in _KEYS or not given <= _KEYS[kind]:
        raise keys.refuse(f"RoPE scaling is {kind!r} with {sorted(given)}", [name for name in _KEYS if name != "none"])
    if kind == "none":
        return None
    factor = keys.number(f"{prefix}rope.scaling.factor" if "factor" in given else old)
    if not factor > 0:
        raise keys.wrong(f"{prefix}rope.scaling.factor" if "factor" in given else old, "a number above 0")
    scaling: dict[str, object] = {"rope_type": kind, "factor": shortest(factor)}
    if "original_context_length" in given:
        scaling["original_max_position_embeddings"] = keys.count(f"{prefix}rope.scaling.original_context_length")
    return scaling if kind == "linear" else scaling | _yarn(keys, f"{prefix}rope.scaling.", given)


def shortest(number: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, where the file's float32 reads 9.999999747e-06."""
    for digits in range(1, 10):
        short = float(f"{number:.{digits}g}")
        try:
            if struct.pack("<f", short) == struct.pack("<f", number):
                return short
        except OverflowError:  # a float64 beyond float32
            break
    return float(number)


def _yarn(keys: Metadata, prefix: str, given: set[str]) -> dict[str, object]:
    """YaRN's own numbers. A log multiplier is what transformers calls `mscale_all_dim`, beside an mscale of 1."""
    if keys.number(prefix + _EXTRAPOLATION, 1.0) != 1.0:
        raise keys.refuse(f"YaRN has an extrapolation factor of {keys.number(prefix + _EXTRAPOLATION)}")
    numbers: dict[str, object] = {
        hf_key: shortest(keys.number(prefix + key)) for key, hf_key in _YARN_NUMBERS.items() if key in given
    }
    multiplier = keys.number(prefix + _LOG_MULTIPLIER, 0.0)
    return numbers | ({"mscale": 1.0, "mscale_all_dim": shortest(multiplier)} if multiplier else {})


def _llama3(header: GGUFHeader, *, head_dim: int, theta: float) -> dict[str, object]:
    tensor = header.tensors[ROPE_FREQUENCIES]
    if tensor.type_name != "F32" or tensor.shape != (head_dim // 2,):
        raise ModelLoadError(f"{header.path}: tensor {tensor.name!r} is not one float32 per rotary frequency")
    with header.path.open("rb") as file:
        file.seek(tensor.offset)
        divisors = struct.unpack(f"<{head_dim // 2}f", file.read(tensor.num_bytes))
    factor = max(divisors)
    is_possible = math.isfinite(factor) and factor > 0
    expected = (
        [_llama3_divisor(theta ** (2 * i / head_dim), factor) for i in range(head_dim // 2)] if is_possible else []
    )
    if not is_possible or any(not math.isclose(a, b, rel_tol=1e-4) for a, b in zip(divisors, expected, strict=True)):
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
