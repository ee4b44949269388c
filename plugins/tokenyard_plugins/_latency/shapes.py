"""Shapes of decoders: a few well-known ones, and any that a config.json describes."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import msgspec
from tokenyard.errors import ConfigError

_LONGEST = 1 << 20  # bytes of a config.json
_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}
_UNLIKE = ("num_experts", "num_local_experts", "n_routed_experts", "kv_lora_rank", "ssm_cfg", "layer_types")

Size = Annotated[int, msgspec.Meta(ge=1, le=1 << 24)]


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder of dense layers with a gated MLP. The names are those of config.json."""

    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    num_key_value_heads: Size
    vocab_size: Size
    head_dim: Size
    bytes_per_value: int = 2

    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of the matrix multiplications of a layer."""
        heads, kv_heads = self.num_attention_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        return (
            (self.hidden_size, heads + 2 * kv_heads),
            (heads, self.hidden_size),
            (self.hidden_size, 2 * self.intermediate_size),
            (self.intermediate_size, self.hidden_size),
        )


class _ConfigFile(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: Size
    intermediate_size: Size
    num_hidden_layers: Size
    num_attention_heads: Size
    vocab_size: Size
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    torch_dtype: str | None = None
    dtype: str | None = None


def _shape(hidden: int, mlp: int, layers: int, heads: int, kv_heads: int, vocab: int, head_dim: int) -> ModelShape:
    return ModelShape(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=vocab,
        head_dim=head_dim,
    )


MODELS = {
    "llama-2-7b": _shape(4096, 11008, 32, 32, 32, 32000, 128),
    "llama-2-70b": _shape(8192, 28672, 80, 64, 8, 32000, 128),
    "llama-3.1-8b": _shape(4096, 14336, 32, 32, 8, 128256, 128),
    "llama-3.1-70b": _shape(8192, 28672, 80, 64, 8, 128256, 128),
    "mistral-7b": _shape(4096, 14336, 32, 32, 8, 32768, 128),
    "qwen2.5-7b": _shape(3584, 18944, 28, 28, 4, 152064, 128),
    "qwen3-8b": _shape(4096, 12288, 36, 32, 8, 151936, 128),
    "qwen3-32b": _shape(5120, 25600, 64, 64, 8, 151936, 128),
    "smollm2-135m": _shape(576, 1536, 30, 9, 3, 49152, 64),
}


def find_shape(key: str, model: str) -> ModelShape:
    """By the name of a known one, or by the path of a config.json or of its folder. Raises ConfigError."""
    if model in MODELS:
        return MODELS[model]
    path = Path(model)
    path = path / "config.json" if path.is_dir() else path
    if not model or not path.is_file():
        raise ConfigError(
            f"{key}={model!r}: no such model; give a config.json, its folder, or one of {', '.join(MODELS)}"
        )
    return _read(path)


def _read(path: Path) -> ModelShape:
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST + 1)
        if len(content) > _LONGEST:
            raise ConfigError(f"{path}: larger than {_LONGEST} bytes; a config.json is a few lines")
        given = msgspec.json.decode(content, type=_ConfigFile)
        keys = msgspec.json.decode(content, type=dict[str, msgspec.Raw])
    except (OSError, msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
    unlike = [name for name in _UNLIKE if name in keys and bytes(keys[name]) != b"null"]
    if unlike:
        raise ConfigError(f"{path}: it has {unlike[0]}; latency=roofline knows decoders of equal, dense layers only")
    dtype = given.dtype or given.torch_dtype or "bfloat16"
    if dtype not in _BYTES:
        raise ConfigError(f"{path}: its dtype is {dtype!r}; latency=roofline knows {', '.join(_BYTES)}")
    return ModelShape(
        hidden_size=given.hidden_size,
        intermediate_size=given.intermediate_size,
        num_hidden_layers=given.num_hidden_layers,
        num_attention_heads=given.num_attention_heads,
        num_key_value_heads=given.num_key_value_heads or given.num_attention_heads,
        vocab_size=given.vocab_size,
        head_dim=given.head_dim or math.ceil(given.hidden_size / given.num_attention_heads),
        bytes_per_value=_BYTES[dtype],
    )
