"""The model families that the fast decoder runs, and where each differs from Llama. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from tokenyard.errors import ModelLoadError
from tokenyard.model.config_values import flag, integer

Config: TypeAlias = Mapping[str, object]
Windows: TypeAlias = tuple[int | None, ...]  # of each layer; None = full attention
_FULL, _SLIDING = "full_attention", "sliding_attention"


def no_windows(config: Config, num_layers: int) -> Windows:
    """Full attention everywhere."""
    return (None,) * num_layers


def window_everywhere(config: Config, num_layers: int) -> Windows:
    """`sliding_window` in every layer, null for none (Mistral)."""
    return (_window(config),) * num_layers


def windows_from_a_layer_on(config: Config, num_layers: int) -> Windows:
    """By `layer_types`, else in the layers from `max_window_layers` on (Qwen)."""
    first = integer(config, "max_window_layers", least=0)
    return _windows(config, num_layers, [index >= first for index in range(num_layers)])


def windows_where_nothing_rotates(config: Config, num_layers: int) -> Windows:
    """By `layer_types`, else in the layers without rotary embedding (SmolLM3)."""
    return _windows(config, num_layers, [not rotates for rotates in some_rotate(config, num_layers)])


def all_rotate(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Rotary embedding in every layer."""
    return (True,) * num_layers


def some_rotate(config: Config, num_layers: int) -> tuple[bool, ...]:
    """Rotary embedding where `no_rope_layers` has a 1, else in all but each `no_rope_layer_interval`-th layer."""
    switches = config.get("no_rope_layers")
    if switches is None:
        interval = integer(config, "no_rope_layer_interval")
        return tuple((index + 1) % interval != 0 for index in range(num_layers))
    if not isinstance(switches, Sequence) or len(switches) < num_layers or any(item not in (0, 1) for item in switches):
        raise ModelLoadError(
            f"config.json: 'no_rope_layers' must be a list of 0 and 1 for each of {num_layers} layers, got {switches!r}"
        )
    return tuple(bool(item) for item in switches[:num_layers])


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One architecture. A bias is there, or is not, or is where the config says it is, under the key given here."""

    name: str  # transformers' model type
    qkv_bias: bool | str = "attention_bias"
    output_bias: bool | str = "attention_bias"
    mlp_bias: bool | str = "mlp_bias"
    head_norms: bool = False  # RMS norm of each query and key head, before they are rotated
    windows: Callable[[Config, int], Windows] = no_windows
    rotates: Callable[[Config, int], tuple[bool, ...]] = all_rotate
    reads: frozenset[str] = frozenset()  # keys of `NEUTRAL` that the family does read
    defaults: Config = field(default_factory=dict)  # of absent keys, where they are not Llama's


_QWEN_DEFAULTS: Final[Config] = {
    "num_key_value_heads": 32,
    "max_position_embeddings": 32768,
    "sliding_window": 4096,
    "max_window_layers": 28,
}

FAMILIES: Final[Mapping[str, Family]] = {
    "LlamaForCausalLM": Family(name="llama"),
    "MistralForCausalLM": Family(
        name="mistral",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        windows=window_everywhere,
        reads=frozenset({"sliding_window"}),
        defaults={"num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096},
    ),
    "Qwen2ForCausalLM": Family(
        name="qwen2",
        qkv_bias=True,
        output_bias=False,
        mlp_bias=False,
        windows=windows_from_a_layer_on,
        reads=frozenset({"sliding_window", "layer_types"}),
        defaults=_QWEN_DEFAULTS,
    ),
    "Qwen3ForCausalLM": Family(
        name="qwen3",
        mlp_bias=False,
        head_norms=True,
        windows=windows_from_a_layer_on,
        reads=frozenset({"sliding_window", "layer_types", "use_qk_norm"}),
        defaults={**_QWEN_DEFAULTS, "head_dim": 128},
    ),
    "SmolLM3ForCausalLM": Family(
        name="smollm3",
        windows=windows_where_nothing_rotates,
        rotates=some_rotate,
        reads=frozenset({"sliding_window", "layer_types", "no_rope_layers"}),
        defaults={
            "num_key_value_heads": 4,
            "max_position_embeddings": 32768,
            "rope_theta": 2_000_000.0,
            "no_rope_layer_interval": 4,
            "tie_word_embeddings": True,
        },
    ),
    "GraniteForCausalLM": Family(
        name="granite",
        reads=frozenset({"embedding_multiplier", "attention_multiplier", "residual_multiplier", "logits_scaling"}),
        defaults={"attention_multiplier": 1.0},
    ),
}

NEUTRAL: Final[Mapping[str, tuple[object, ...]]] = {
    "alibi": (None, False),
    "attention_chunk_size": (None,),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "attn_temperature_tuning": (None, False),
    "clip_qkv": (None,),
    "embedding_multiplier": (None, 1),
    "final_logit_softcapping": (None,),
    "is_causal": (None, True),
    "layer_types": (None, "full_attention"),
    "logit_scale": (None, 1),
    "logits_scaling": (None, 1),
    "no_rope_layers": (None, 1),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1),
    "rope_interleaved": (None, False),
    "rotary_pct": (None, 1),
    "sliding_window": (None,),
    "use_bidirectional_attention": (None, False),
    "use_mrope": (None, False),
    "use_qk_norm": (None, False),
}
"""Keys that change a model's numbers without adding tensors, and the values at which they, or all items, do nothing."""


def unread_keys(config: Config, family: Family) -> list[str]:
    """What the config asks for and this family's forward pass does not read; such a model is not what it says."""
    return [
        f"{family.name} does not read {key}, which is {config[key]!r}"
        for key, neutral in NEUTRAL.items()
        if key not in family.reads and not _is_neutral(config.get(key), neutral)
    ]


def _is_neutral(value: object, neutral: tuple[object, ...]) -> bool:
    return all(item in neutral for item in value) if isinstance(value, list) else value in neutral


def _windows(config: Config, num_layers: int, default: Sequence[bool]) -> Windows:
    """The window of each layer that slides: by `layer_types`, else by `default`."""
    window = _window(config) if flag(config, "use_sliding_window") else None
    kinds = config.get("layer_types")
    if kinds is None:
        return tuple(window if slides else None for slides in default)
    known = isinstance(kinds, Sequence) and all(kind in (_FULL, _SLIDING) for kind in kinds)
    if not isinstance(kinds, Sequence) or not known or len(kinds) != num_layers:
        raise ModelLoadError(
            f"config.json: 'layer_types' must name {_FULL} or {_SLIDING} for each of {num_layers} layers, got {kinds!r}"
        )
    if window is None and _SLIDING in kinds:
        raise ModelLoadError(
            f"config.json: 'layer_types' has {_SLIDING}, but use_sliding_window and sliding_window give no window"
        )
    return tuple(window if kind == _SLIDING else None for kind in kinds)


def _window(config: Config) -> int | None:
    return None if config.get("sliding_window") is None else integer(config, "sliding_window")
