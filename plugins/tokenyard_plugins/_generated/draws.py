"""Random numbers of workloads: a stream for each quantity, drawn in chunks, so that nothing grows with their number."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import TypeAlias
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

CHUNK = 1024
"""Values that are drawn at once. Part of what a seed means: another number gives other workloads."""

Ints: TypeAlias = NDArray[np.int64]
Floats: TypeAlias = NDArray[np.float64]


def generator(seed: int, *path: str | int) -> np.random.Generator:
    """The generator of one quantity. It depends on the seed and the quantity's name, and on no other quantity."""
    words = [crc32(part.encode()) if isinstance(part, str) else part for part in path]
    return np.random.default_rng([seed, *words])


def stream(draw: Callable[[np.random.Generator, int], Ints], rng: np.random.Generator) -> Iterator[int]:
    """What `draw` draws, without end; the value at a place is the same however many are taken."""
    while True:
        yield from draw(rng, CHUNK).tolist()


def gamma_stream(mean: float, cv: float, rng: np.random.Generator) -> Iterator[float]:
    """Numbers without end, of a Gamma distribution whose standard deviation is `cv` times its mean."""
    if mean == 0 or cv == 0:
        yield from itertools.repeat(mean)
    shape = cv**-2
    while True:
        yield from rng.gamma(shape, mean / shape, size=CHUNK).tolist()


def shuffled(num_kinds: int, count: int, rng: np.random.Generator) -> Iterator[int]:
    """`count` of each of the kinds 0, 1, ... in random order, each order as likely as any other.

    A chunk takes from what is left of each kind, as from an urn, so no order of all of them is ever held.
    """
    left = np.full(num_kinds, count, dtype=np.int64)
    while (num_left := int(left.sum())) > 0:
        taken = rng.multivariate_hypergeometric(left, min(CHUNK, num_left), method="marginals")
        left -= taken
        yield from rng.permutation(np.repeat(np.arange(num_kinds), taken)).tolist()
