"""What the fast decoder reads of a config.json: typed, checked, and refused by name where it does not hold.

Imports no torch: `tokenyard doctor` asks here which decoder a model would get.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenyard.errors import ModelLoadError, did_you_mean

FAST_ARCHITECTURES = ("LlamaForCausalLM",)
FAST_DESCRIPTION = "fast decoder (llama)"
FAST_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
ADAPTER_ROPE_TYPES = ("dynamic", "longrope", "proportional")  # known to transformers only
_MOST_LAYERS, _LARGEST_SIZE, _LARGEST_NUMBER = 10_000, 2**31, 1e30  # beyond these a config.json is damaged
_POSITIVE = frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"})
_SCALED_FROM_ORIGINAL = ("llama3", "yarn")


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: `parameters` holds the numbers of the scaling type, under transformers' names."""

    type: str
    theta: float
    parameters: Mapping[str, object]
    max_position_embeddings: int

    def number(self, key: str, default: float | None = None) -> float:
        """The number `key` of this scaling type; a missing one without a default is an error that names it."""
        value = self.parameters.get(key, default)
        if value is None:
            value = default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise ModelLoadError(
                f"config.json: rope type '{self.type}' needs a number for '{key}', got {value!r}; fix rope_parameters"
            )
        if key in _POSITIVE and not 0 < value < _LARGEST_NUMBER:
            raise ModelLoadError(
                f"config.json: rope type '{self.type}' needs a positive '{key}', got {value!r}; fix rope_parameters"
            )
        return float(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a Llama-shaped model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    rope: RopeConfig


def fast_decoder_reasons(config: Mapping[str, object]) -> list[str]:
    """Why the fast decoder cannot run a model of this config; empty = it can.

    A rope type that nobody knows raises ModelLoadError: no decoder would be right about it.
    """
    architecture = _architecture(config)
    if architecture not in FAST_ARCHITECTURES:
        return [f"architecture {architecture} is not one of: {', '.join(FAST_ARCHITECTURES)}"]
    reasons = []
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        reasons.append(f"hidden_act '{activation}' is not silu")
    rope = _rope_parameters(config)
    rope_type = _rope_type(rope)
    if rope_type not in FAST_ROPE_TYPES:
        reasons.append(f"rope type '{rope_type}' is not one of: {', '.join(FAST_ROPE_TYPES)}")
    partial = rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        reasons.append(f"partial_rotary_factor {partial} is not 1")
    return reasons


def parse_decoder_config(config: Mapping[str, object]) -> DecoderConfig:
    """The typed form of a config that `fast_decoder_reasons` has no objection to."""
    hidden_size = _integer(config, "hidden_size")
    num_heads = _integer(config, "num_attention_heads")
    num_kv_heads = _integer(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = _integer(config, "head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelLoadError(f"config.json: head_dim {head_dim} is odd; rotary embeddings need an even one")
    return DecoderConfig(
        vocab_size=_integer(config, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        num_layers=_integer(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        tie_word_embeddings=_flag(config, "tie_word_embeddings"),
        attention_bias=_flag(config, "attention_bias"),
        mlp_bias=_flag(config, "mlp_bias"),
        rope=parse_rope(config),
    )


def parse_rope(config: Mapping[str, object]) -> RopeConfig:
    """`rope_parameters`, or the older `rope_scaling` beside `rope_theta`; the type is `rope_type` or `type`."""
    parameters = dict(_rope_parameters(config))
    rope_type = _rope_type(parameters)
    limit = _integer(config, "max_position_embeddings", 2048)
    if rope_type in _SCALED_FROM_ORIGINAL:
        # A value beside the parameters wins over one inside them, as in transformers.
        outer = config.get("original_max_position_embeddings")
        original = limit if outer is None else outer
        parameters.setdefault("original_max_position_embeddings", limit)
        if outer is not None:
            parameters["original_max_position_embeddings"] = original
    theta = parameters.get("rope_theta")
    source = config if theta is None else parameters
    return RopeConfig(
        type=rope_type,
        theta=_number(source, "rope_theta", 10000.0),
        parameters=parameters,
        max_position_embeddings=limit,
    )


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if isinstance(names, (list, tuple)) and len(names) == 1 and isinstance(names[0], str):
        return names[0]
    raise ModelLoadError(f"config.json: 'architectures' must name exactly one class, got {names!r}")


def _rope_parameters(config: Mapping[str, object]) -> Mapping[str, object]:
    value = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(value, Mapping):
        raise ModelLoadError(f"config.json: rope parameters must be an object, got {value!r}")
    if any(isinstance(item, Mapping) for item in value.values()):
        raise ModelLoadError("config.json: rope parameters per layer type are not available for this architecture")
    return value


def _rope_type(parameters: Mapping[str, object]) -> str:
    name = parameters.get("rope_type", parameters.get("type", "default"))
    known = (*FAST_ROPE_TYPES, *ADAPTER_ROPE_TYPES)
    if not isinstance(name, str) or name not in known:
        raise ModelLoadError(
            f"config.json: unknown rope type {name!r}; known: {', '.join(known)}{did_you_mean(str(name), known)}"
        )
    return name


def _integer(config: Mapping[str, object], key: str, default: int | None = None) -> int:
    value = config.get(key)
    if value is None:
        value = default
    limit = _MOST_LAYERS if key == "num_hidden_layers" else _LARGEST_SIZE
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= limit:
        raise ModelLoadError(f"config.json: '{key}' must be an integer from 1 to {limit}, got {config.get(key)!r}")
    return value


def _number(config: Mapping[str, object], key: str, default: float) -> float:
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < _LARGEST_NUMBER:
        raise ModelLoadError(f"config.json: '{key}' must be a positive number below {_LARGEST_NUMBER:g}, got {value!r}")
    return value


def _flag(config: Mapping[str, object], key: str) -> bool:
    value = config.get(key)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise ModelLoadError(f"config.json: '{key}' must be true or false, got {value!r}")
    return value
