"""Rotary position embedding. Tables equal transformers' bit for bit in float32, for the types the fast decoder has.

Legend: T = tokens, D = head size.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from tokenyard.model.rope_config import RopeConfig


class Rotation(NamedTuple):
    """Factors of one step's positions, in the model's data type."""

    cos: torch.Tensor  # [T, 1, D]
    signed_sin: torch.Tensor  # [T, 1, D]; the first half is negated, so that rotating needs no negation


class RotaryEmbedding:
    """Cosines and sines of positions. They are computed per step: any position works, and nothing is kept."""

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        frequencies, self.attention_factor = inverse_frequencies(config, head_dim)
        self.inverse_frequencies = frequencies.to(device)  # [D / 2]
        self._growth = DynamicGrowth(config, head_dim, device) if config.type == "dynamic" else None

    def __call__(self, positions: torch.Tensor, dtype: torch.dtype) -> Rotation:
        """Factors of `positions` [T]; every row depends on its own position only."""
        frequencies = self.inverse_frequencies
        if self._growth is not None:
            frequencies = self._growth(positions, frequencies)
        angles = positions[:, None].float() * frequencies
        cos = angles.cos() * self.attention_factor
        sin = angles.sin() * self.attention_factor
        return Rotation(
            torch.cat((cos, cos), -1).to(dtype).unsqueeze(1),
            torch.cat((-sin, sin), -1).to(dtype).unsqueeze(1),
        )


class DynamicGrowth:
    """Dynamic NTK scaling: a token beyond the original length is rotated by the table of a sequence that ends with it.

    So transformers rotates the tokens of one sequence that it decodes one by one; the tokens before keep the rotations
    that they have in the cache. A row depends on its own position alone, however it was batched, cut or recomputed.
    """

    def __init__(self, config: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._theta = config.theta
        self._factor = config.number("factor")
        self._original = config.max_position_embeddings
        self._power = head_dim / (head_dim - 2)
        self._exponents = (torch.arange(0, head_dim, 2).float() / head_dim).to(device)  # [D / 2]

    def __call__(self, positions: torch.Tensor, plain: torch.Tensor) -> torch.Tensor:
        """Inverse frequencies [T, D / 2] of `positions` [T]; `plain` [D / 2] up to the original length."""
        lengths = (positions + 1)[:, None]
        stretch = self._factor * lengths.clamp_min(self._original) / self._original - (self._factor - 1)
        grown = 1.0 / ((self._theta * stretch**self._power) ** self._exponents)
        return torch.where(lengths > self._original, grown, plain)


def rotate(heads: torch.Tensor, rotation: Rotation) -> torch.Tensor:
    """Rotate `heads` [T, H, D] by their positions; a new tensor."""
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return (heads * rotation.cos).add_(swapped.mul_(rotation.signed_sin))


def inverse_frequencies(config: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Inverse frequencies [D / 2] in float32, and the factor that multiplies cosines and sines."""
    powers = config.theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
    if config.type == "yarn":
        return _yarn(config, head_dim, powers), _yarn_attention_factor(config)
    plain = 1.0 / powers
    if config.type == "linear":
        return plain / config.number("factor"), 1.0
    if config.type == "llama3":
        return _llama3(config, plain), 1.0
    return plain, 1.0


def _llama3(config: RopeConfig, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are divided by the factor, short ones kept, those between interpolated."""
    factor = config.number("factor")
    low, high = config.number("low_freq_factor"), config.number("high_freq_factor")
    original = config.number("original_max_position_embeddings")
    wavelengths = 2 * math.pi / plain
    scaled = torch.where(wavelengths > original / low, plain / factor, plain)
    share = (original / wavelengths - low) / (high - low)
    between = (wavelengths >= original / high) & (wavelengths <= original / low)
    return torch.where(between, (1 - share) * scaled / factor + share * scaled, scaled)


def _yarn(config: RopeConfig, head_dim: int, powers: torch.Tensor) -> torch.Tensor:
    """A ramp over the dimensions between the frequencies as they are and divided by the factor."""
    original = config.number("original_max_position_embeddings")

    def dimension(rotations: float) -> float:
        turns = original / (rotations * 2 * math.pi)
        return (head_dim * math.log(turns)) / (2 * math.log(config.theta))

    low, high = dimension(config.number("beta_fast", 32.0)), dimension(config.number("beta_slow", 1.0))
    if config.parameters.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    high = high + 0.001 if low == high else high
    ramp = ((torch.arange(head_dim // 2).float() - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (config.number("factor") * powers)) * (1 - kept) + (1.0 / powers) * kept


def _yarn_attention_factor(config: RopeConfig) -> float:
    if config.parameters.get("attention_factor") is not None:
        return config.number("attention_factor")
    factor = config.number("factor")

    def magnitude(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    numerator, denominator = config.parameters.get("mscale"), config.parameters.get("mscale_all_dim")
    if numerator and denominator:
        return magnitude(config.number("mscale")) / magnitude(config.number("mscale_all_dim"))
    return magnitude(1.0)
