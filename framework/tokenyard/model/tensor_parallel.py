"""Which models can be shared among several ranks, and each rank's part of one. Imports no torch.

A rank has whole K/V heads with the query heads that attend to them, and an equal part of the MLP's inner size and of
the vocabulary, which is padded where it does not divide.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError
from tokenyard.model.decoder_config import fast_decoder_reasons, parse_decoder_config

if TYPE_CHECKING:
    from tokenyard.model.decoder_config import DecoderConfig
    from tokenyard.model.files import ModelFiles


def check_tensor_parallel_size(files: ModelFiles, size: int) -> None:
    """Raise ConfigError when so many ranks cannot share the model; the message has the sizes that can."""
    if size == 1:
        return
    given = f"executor.tensor_parallel_size={size}: {files.name}"
    if reasons := fast_decoder_reasons(files.config):
        raise ConfigError(
            f"{given} cannot be shared by several ranks, because only the fast decoder can be, and it does not run "
            f"this model ({'; '.join(reasons)}); allowed: 1"
        )
    config = parse_decoder_config(files.config)
    if size not in (allowed := allowed_sizes(config)):
        raise ConfigError(
            f"{given} has {config.num_kv_heads} K/V heads and an intermediate size of {config.intermediate_size}, "
            f"which do not both divide by it; allowed: {', '.join(map(str, allowed))}"
        )


def allowed_sizes(config: DecoderConfig) -> list[int]:
    """Numbers of ranks that can share a model."""
    heads, inner = config.num_kv_heads, config.intermediate_size
    return [size for size in range(1, heads + 1) if heads % size == 0 and inner % size == 0]


def config_of_rank(config: DecoderConfig, size: int) -> DecoderConfig:
    """What one of `size` ranks computes with; its vocabulary stays the whole one."""
    return replace(
        config,
        num_heads=config.num_heads // size,
        num_kv_heads=config.num_kv_heads // size,
        intermediate_size=config.intermediate_size // size,
    )
