"""Random draws that depend on a seed and a position only."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.worker.sampling.running_sums import RunningSums

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from numpy.typing import NDArray

    from tokenyard.arrays import IntArray
    from tokenyard.worker.input_batch import SampledRequest

_MASK = 2**64 - 1
_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def request_seed(engine_seed: int, request: SampledRequest) -> int:
    """The request's own seed, or one that its id and the engine's seed make: the same in any process, at any time."""
    if request.params.seed is not None:
        return request.params.seed & _MASK
    text = f"{engine_seed}:{request.request_id}".encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


class Streams:
    """The random numbers of S requests: one for each position."""

    def __init__(self, seeds: Sequence[int]) -> None:
        self._starts = _mix(np.array(seeds, dtype=np.uint64) + _GAMMA)  # mixed: seeds 1 and 2 are far apart

    def uniforms(self, positions: IntArray) -> NDArray[np.float64]:
        """[S] numbers in [0, 1), multiples of 2**-53, for the tokens that get these positions [S]."""
        mixed = _mix(self._starts + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
        return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The output function of splitmix64 (Steele, Lea, Flood 2014), a bijection."""
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))


def pick(weights: torch.Tensor, uniforms: torch.Tensor) -> torch.Tensor:
    """[S] int64: the first token at which the running sum of weights [S, V] exceeds `uniforms` [S] of the whole.

    Weights are float32 on the grid of `softmax_`, uniforms float64 in [0, 1). A token of weight 0 is never picked. A
    row whose weights are all 0 or NaN gets some token of the vocabulary.
    """
    sums = RunningSums(weights)
    return sums.first_above(uniforms * sums.totals).clamp_(max=weights.shape[-1] - 1)
