"""What the fast decoder reads of a config.json: typed, checked, and refused by name where it does not hold.

Imports no torch: `tokenyard doctor` asks here which decoder a model would get.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tokenyard.errors import ModelLoadError
from tokenyard.model.config_values import flag, integer, number
from tokenyard.model.families import FAMILIES, Family, unread_keys
from tokenyard.model.rope_config import RopeConfig, parse_rope, rope_reasons

_SILU = ("silu", "swish")  # one function under two names


@dataclass(frozen=True, slots=True, kw_only=True)
class DecoderConfig:
    """Sizes and switches of a model."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    mlp_bias: bool
    head_norms: bool
    attention_scale: float
    embedding_multiplier: float
    residual_multiplier: float
    logits_scaling: float  # logits are divided by it
    windows: tuple[int | None, ...]  # of each layer; None = full attention
    rotates: tuple[bool, ...]  # each layer
    rope: RopeConfig

    @property
    def description(self) -> str:
        """For `CausalLM.description`."""
        return f"fast decoder ({self.family})"

    @property
    def num_parameters(self) -> int:
        """Numbers in the weights, those of a tied embedding once."""
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        outputs = queries + 2 * keys
        layer = (outputs + queries) * self.hidden_size + 3 * self.intermediate_size * self.hidden_size
        layer += 2 * self.hidden_size + 2 * self.head_dim * self.head_norms
        layer += outputs * self.qkv_bias + self.hidden_size * self.output_bias
        layer += (2 * self.intermediate_size + self.hidden_size) * self.mlp_bias
        embeddings = (1 if self.tie_word_embeddings else 2) * self.vocab_size * self.hidden_size
        return embeddings + self.num_layers * layer + self.hidden_size


def fast_decoder_reasons(config: Mapping[str, object]) -> list[str]:
    """Why the fast decoder cannot run a model of this config; empty = it can.

    A rope type that nobody knows raises ModelLoadError: no decoder would be right about it.
    """
    architecture = _architecture(config)
    family = FAMILIES.get(architecture)
    if family is None:
        return [f"architecture {architecture} is not one of: {', '.join(FAMILIES)}"]
    reasons = []
    model_type = config.get("model_type", family.name)
    if model_type != family.name:
        reasons.append(f"model_type '{model_type}' is not {family.name}, which {architecture} belongs to")
    activation = config.get("hidden_act", "silu")
    if activation not in _SILU:
        reasons.append(f"hidden_act '{activation}' is not silu")
    return [*reasons, *rope_reasons(config), *unread_keys(config, family)]


def parse_decoder_config(config: Mapping[str, object]) -> DecoderConfig:
    """The typed form of a config that `fast_decoder_reasons` has no objection to."""
    family = _family(_architecture(config))
    config = {**family.defaults, **config}
    num_layers = integer(config, "num_hidden_layers")
    num_heads, num_kv_heads, head_dim = _head_sizes(config)
    return DecoderConfig(
        family=family.name,
        vocab_size=integer(config, "vocab_size"),
        hidden_size=integer(config, "hidden_size"),
        intermediate_size=integer(config, "intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=number(config, "rms_norm_eps", 1e-6),
        tie_word_embeddings=flag(config, "tie_word_embeddings"),
        qkv_bias=_is_there(config, family.qkv_bias),
        output_bias=_is_there(config, family.output_bias),
        mlp_bias=_is_there(config, family.mlp_bias),
        head_norms=family.head_norms,
        attention_scale=number(config, "attention_multiplier", head_dim**-0.5),
        embedding_multiplier=number(config, "embedding_multiplier", 1.0),
        residual_multiplier=number(config, "residual_multiplier", 1.0),
        logits_scaling=number(config, "logits_scaling", 1.0),
        windows=family.windows(config, num_layers),
        rotates=family.rotates(config, num_layers),
        rope=_rope(config, head_dim),
    )


def _family(architecture: str) -> Family:
    if architecture not in FAMILIES:
        raise ModelLoadError(f"the fast decoder has no {architecture}; it has: {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def _head_sizes(config: Mapping[str, object]) -> tuple[int, int, int]:
    """Query heads, KV heads, head size."""
    num_heads = integer(config, "num_attention_heads")
    num_kv_heads = integer(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelLoadError(
            f"config.json: num_attention_heads {num_heads} is not a multiple of num_key_value_heads {num_kv_heads}"
        )
    head_dim = integer(config, "head_dim", integer(config, "hidden_size") // num_heads)
    if head_dim % 2:
        raise ModelLoadError(f"config.json: head_dim {head_dim} is odd; rotary embeddings need an even one")
    return num_heads, num_kv_heads, head_dim


def _rope(config: Mapping[str, object], head_dim: int) -> RopeConfig:
    rope = parse_rope(config)
    if rope.type == "dynamic" and head_dim < 4:
        raise ModelLoadError(f"config.json: rope type 'dynamic' needs a head_dim of at least 4, got {head_dim}")
    return rope


def _is_there(config: Mapping[str, object], bias: bool | str) -> bool:
    return flag(config, bias) if isinstance(bias, str) else bias


def _architecture(config: Mapping[str, object]) -> str:
    names = config.get("architectures")
    if isinstance(names, (list, tuple)) and len(names) == 1 and isinstance(names[0], str):
        return names[0]
    raise ModelLoadError(f"config.json: 'architectures' must name exactly one class, got {names!r}")
