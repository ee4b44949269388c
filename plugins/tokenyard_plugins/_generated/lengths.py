"""Distributions of lengths in tokens, drawn in arrays."""

from __future__ import annotations

import itertools
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenyard_plugins._generated.draws import stream
from tokenyard_plugins._generated.length_histograms import MOST_TOKENS, Histogram, read_histogram

if TYPE_CHECKING:
    from tokenyard_plugins._generated.draws import Floats, Ints
    from tokenyard_plugins._generated.length_options import LengthOptions, LengthSpec


class Lengths(ABC):
    """A distribution that can be drawn from."""

    @property
    @abstractmethod
    def mean(self) -> float:
        """Expected value, before `min` and `max`."""

    @abstractmethod
    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        """[count], each from 1 to MOST_TOKENS."""


def make_lengths(spec: LengthSpec) -> Lengths:
    """The distribution that an option means."""
    if isinstance(spec, int):
        return _Mixture([spec], [1.0])
    kind = _make_kind(spec)
    if spec.kind == "uniform" or (spec.min is None and spec.max is None):
        return kind
    return _Bounded(kind, spec.min or 1, spec.max or MOST_TOKENS)


def length_stream(spec: LengthSpec, rng: np.random.Generator) -> Iterator[int]:
    """Lengths without end."""
    if isinstance(spec, int):
        return itertools.repeat(spec)
    return stream(make_lengths(spec).draw, rng)


def priority_stream(shares: Sequence[float], rng: np.random.Generator) -> Iterator[int]:
    """Priorities without end: how often there is 0, 1, 2, ...; 0 alone when nothing is said."""
    if not shares:
        return itertools.repeat(0)
    return stream(_Mixture(range(len(shares)), shares).draw, rng)


def _make_kind(spec: LengthOptions) -> Lengths:
    if spec.value is not None:
        return _Mixture([spec.value], [1.0])
    if spec.histogram is not None:
        return _Empirical(read_histogram(spec.histogram))
    if spec.weights is not None:
        if spec.parts is not None:
            return _MixtureOfParts([make_lengths(part) for part in spec.parts], spec.weights)
        return _Mixture(spec.values or (), spec.weights)
    if spec.mean is not None:
        return _Geometric(spec.mean) if spec.cv is None else _Lognormal(spec.mean, spec.cv)
    return _Uniform(spec.min or 1, spec.max or MOST_TOKENS)


class _Bounded(Lengths):
    def __init__(self, inner: Lengths, least: int, most: int) -> None:
        self._inner, self._least, self._most = inner, least, most

    @property
    def mean(self) -> float:
        return min(max(self._inner.mean, self._least), self._most)

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        return np.clip(self._inner.draw(rng, count), self._least, self._most)


class _Uniform(Lengths):
    def __init__(self, least: int, most: int) -> None:
        self._least, self._most = least, most

    @property
    def mean(self) -> float:
        return (self._least + self._most) / 2

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        return rng.integers(self._least, self._most, size=count, endpoint=True)


class _Lognormal(Lengths):
    """Rounded to whole numbers."""

    def __init__(self, mean: float, cv: float) -> None:
        self._mean = mean
        variance = math.log1p(cv * cv)
        self._mu, self._sigma = math.log(mean) - variance / 2, math.sqrt(variance)

    @property
    def mean(self) -> float:
        return self._mean

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        drawn = np.rint(rng.lognormal(self._mu, self._sigma, size=count))
        return np.clip(drawn, 1, MOST_TOKENS).astype(np.int64)


class _Geometric(Lengths):
    """From 1 on, each number less likely than the one before: the discrete exponential distribution."""

    def __init__(self, mean: float) -> None:
        self._mean = mean

    @property
    def mean(self) -> float:
        return self._mean

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        return np.clip(rng.geometric(1 / self._mean, size=count), 1, MOST_TOKENS)


class _Mixture(Lengths):
    def __init__(self, values: Sequence[int], weights: Sequence[float]) -> None:
        self._values = np.array(values, dtype=np.int64)
        self._shares = _shares(weights)

    @property
    def mean(self) -> float:
        return float(self._values @ self._shares)

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        chosen: Ints = self._values[rng.choice(len(self._values), size=count, p=self._shares)]
        return chosen


class _MixtureOfParts(Lengths):
    def __init__(self, parts: Sequence[Lengths], weights: Sequence[float]) -> None:
        self._parts, self._shares = parts, _shares(weights)

    @property
    def mean(self) -> float:
        return sum(part.mean * float(share) for part, share in zip(self._parts, self._shares, strict=True))

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        chosen = rng.choice(len(self._parts), size=count, p=self._shares)
        drawn = np.zeros(count, dtype=np.int64)
        for index, part in enumerate(self._parts):
            places = chosen == index
            drawn[places] = part.draw(rng, int(places.sum()))
        return drawn


class _Empirical(Lengths):
    """A bin by its count, then any number of the bin."""

    def __init__(self, histogram: Histogram) -> None:
        self._lows, self._highs = np.array(histogram.lows), np.array(histogram.highs)
        self._shares = _shares(histogram.counts)

    @property
    def mean(self) -> float:
        return float(((self._lows + self._highs) / 2) @ self._shares)

    def draw(self, rng: np.random.Generator, count: int) -> Ints:
        bins = rng.choice(len(self._lows), size=count, p=self._shares)
        return rng.integers(self._lows[bins], self._highs[bins], endpoint=True)


def _shares(weights: Sequence[float]) -> Floats:
    array = np.array(weights, dtype=np.float64)
    shares: Floats = array / array.sum()
    return shares
