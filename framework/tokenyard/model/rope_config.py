"""What a config.json says of rotary embeddings, in every spelling that is around. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenyard.errors import ModelLoadError, did_you_mean
from tokenyard.model.config_values import LARGEST_NUMBER, integer, number

_COMMON_KEYS = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
# The types of the fast decoder, each with the numbers that it reads.
_KEYS: Mapping[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"}),
    "yarn": frozenset({
        "factor",
        "original_max_position_embeddings",
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "mscale",
        "mscale_all_dim",
        "truncate",
    }),
}  # fmt: skip
FAST_ROPE_TYPES = tuple(_KEYS)
_KNOWN_ELSEWHERE = ("longrope", "proportional")  # types of transformers that no decoder here computes
_POSITIVE = frozenset({
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
})  # fmt: skip
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
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < LARGEST_NUMBER:
            raise ModelLoadError(
                f"config.json: rope type '{self.type}' needs a number for '{key}', got {value!r}; fix rope_parameters"
            )
        if key in _POSITIVE and not value > 0:
            raise ModelLoadError(
                f"config.json: rope type '{self.type}' needs a positive '{key}', got {value!r}; fix rope_parameters"
            )
        return float(value)


def rope_reasons(config: Mapping[str, object]) -> list[str]:
    """Why the fast decoder cannot compute this model's rotations; empty = it can.

    A type that nobody knows raises ModelLoadError: no decoder would be right about it.
    """
    parameters = _rope_parameters(config)
    rope_type = _rope_type(parameters)
    if rope_type not in _KEYS:
        return [f"rope type '{rope_type}' is not one of: {', '.join(FAST_ROPE_TYPES)}"]
    reasons = []
    unread = sorted(parameters.keys() - _KEYS[rope_type] - _COMMON_KEYS)
    if unread:
        reasons.append(f"rope type '{rope_type}' does not read: {', '.join(unread)}")
    for partial in (parameters.get("partial_rotary_factor"), config.get("partial_rotary_factor")):
        if partial is not None and partial != 1:
            reasons.append(f"partial_rotary_factor {partial} is not 1")
            break
    return reasons


def parse_rope(config: Mapping[str, object]) -> RopeConfig:
    """`rope_parameters`, or the older `rope_scaling` beside `rope_theta`; the type is `rope_type` or `type`."""
    parameters = dict(_rope_parameters(config))
    rope_type = _rope_type(parameters)
    limit = integer(config, "max_position_embeddings", 2048)
    if rope_type in _SCALED_FROM_ORIGINAL:
        # A value beside the parameters wins over one inside them, as in transformers.
        outer = config.get("original_max_position_embeddings")
        parameters.setdefault("original_max_position_embeddings", limit)
        if outer is not None:
            parameters["original_max_position_embeddings"] = outer
    source = config if parameters.get("rope_theta") is None else parameters
    rope = RopeConfig(
        type=rope_type,
        theta=number(source, "rope_theta", 10000.0),
        parameters=parameters,
        max_position_embeddings=limit,
    )
    if rope_type == "yarn" and "factor" in parameters and parameters["factor"] is None:
        parameters["factor"] = limit / rope.number("original_max_position_embeddings")
    if rope_type == "yarn" and not rope.theta > 1:
        raise ModelLoadError(f"config.json: rope type 'yarn' needs a rope_theta above 1, got {rope.theta!r}")
    return rope


def max_prompt_len(config: Mapping[str, object]) -> int | None:
    """The longest prompt, in tokens, whose rotations are defined without regard to how it is computed; None = any.

    With dynamic scaling transformers rotates all tokens of a longer prompt by its length, and so by how it is cut into
    chunks, while the tokens that follow it one by one are rotated by their own positions.
    """
    parameters = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(parameters, Mapping) or rope_type_of(parameters) != "dynamic":
        return None
    return integer(config, "max_position_embeddings", 2048)


def rope_type_of(parameters: Mapping[str, object], default: str | None = None) -> object:
    """What stands for the type, under its name or the older one; `default` when nothing does."""
    return parameters.get("rope_type", parameters.get("type", default))


def _rope_parameters(config: Mapping[str, object]) -> Mapping[str, object]:
    value = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(value, Mapping):
        raise ModelLoadError(f"config.json: rope parameters must be an object, got {value!r}")
    if any(isinstance(item, Mapping) for item in value.values()):
        raise ModelLoadError("config.json: rope parameters per layer type are not available for this architecture")
    return value


def _rope_type(parameters: Mapping[str, object]) -> str:
    name = rope_type_of(parameters, "default")
    known = (*FAST_ROPE_TYPES, *_KNOWN_ELSEWHERE)
    if not isinstance(name, str) or name not in known:
        raise ModelLoadError(
            f"config.json: unknown rope type {name!r}; known: {', '.join(known)}{did_you_mean(str(name), known)}"
        )
    return name
