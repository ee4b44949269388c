"""Options that are lengths in tokens: `512`, or a mapping such as `{kind: lognormal, mean: 500, cv: 1.2}`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from tokenyard_plugins._generated.length_histograms import MOST_TOKENS, read_histogram

_MOST_PARTS = 10_000  # of a mixture
_NEEDS: Mapping[str, tuple[str, ...]] = {
    "constant": ("value",),
    "uniform": ("min", "max"),
    "lognormal": ("mean", "cv"),
    "geometric": ("mean",),
    "mixture": ("weights",),
    "empirical": ("histogram",),
}
_MAY_HAVE: Mapping[str, tuple[str, ...]] = {"mixture": ("values", "parts")}
_ALL_MAY_HAVE = ("min", "max")


@dataclass(frozen=True, slots=True, kw_only=True)
class LengthOptions:
    """A distribution of whole numbers from 1. What a `kind` does not know must be left out, or null."""

    kind: Literal["constant", "uniform", "lognormal", "geometric", "mixture", "empirical"]
    value: int | None = None  # constant
    mean: float | None = None  # lognormal and geometric: before `min` and `max`
    cv: float | None = None  # lognormal: standard deviation by mean
    values: tuple[int, ...] | None = None  # mixture: of numbers; or
    parts: tuple[LengthOptions, ...] | None = None  # mixture: of distributions
    weights: tuple[float, ...] | None = None  # mixture: of its values or parts, of any sum
    histogram: str | None = None  # empirical: a packaged one's name, or the path of a CSV file: length,count
    min: int | None = None  # uniform: the least; else what is drawn below is raised to it; None = 1
    max: int | None = None  # uniform: the most; else what is drawn above is lowered to it; None = 2^24

    def __post_init__(self) -> None:
        self._check_keys()
        _check_range("value", self.value, 1, MOST_TOKENS)
        _check_range("min", self.min, 1, MOST_TOKENS)
        _check_range("max", self.max, self.min or 1, MOST_TOKENS)
        _check_range("mean", self.mean, 1, MOST_TOKENS)
        _check_range("cv", self.cv, 0, 1000)
        if self.kind == "mixture":
            self._check_mixture()
        if self.histogram is not None:
            read_histogram(self.histogram)  # so that a bad one is told at launch

    def _given(self) -> set[str]:
        """The names of what is not None, beside the kind."""
        return {
            name
            for name, value in (
                ("value", self.value),
                ("mean", self.mean),
                ("cv", self.cv),
                ("values", self.values),
                ("parts", self.parts),
                ("weights", self.weights),
                ("histogram", self.histogram),
                ("min", self.min),
                ("max", self.max),
            )
            if value is not None
        }

    def _check_keys(self) -> None:
        needs, given = _NEEDS[self.kind], self._given()
        if missing := [name for name in needs if name not in given]:
            raise ValueError(f"kind={self.kind} needs {' and '.join(needs)}; {missing[0]} is not given")
        known = {*needs, *_MAY_HAVE.get(self.kind, ()), *_ALL_MAY_HAVE}
        if unknown := sorted(given - known):
            raise ValueError(
                f"kind={self.kind} does not know {unknown[0]}, but {', '.join(sorted(known))}; leave it out, or set it "
                "to null"
            )

    def _check_mixture(self) -> None:
        if (self.values is None) == (self.parts is None):
            raise ValueError("kind=mixture needs either values, which are numbers, or parts, which are distributions")
        weights, mixed = self.weights or (), self.values or self.parts or ()
        if not 1 <= len(mixed) == len(weights) <= _MOST_PARTS:
            raise ValueError(
                f"kind=mixture needs as many weights as values or parts, from 1 to {_MOST_PARTS}; got {len(weights)} "
                f"and {len(mixed)}"
            )
        check_shares("weights", weights)
        for value in self.values or ():
            _check_range("values", value, 1, MOST_TOKENS)


LengthSpec: TypeAlias = int | LengthOptions
"""A number of tokens, or a distribution of them."""


def check_lengths(**specs: LengthSpec) -> None:
    """Raises ValueError for a plain number that is no length; a distribution has checked itself."""
    for name, spec in specs.items():
        if isinstance(spec, int):
            _check_range(name, spec, 1, MOST_TOKENS)


def check_shares(name: str, shares: tuple[float, ...]) -> None:
    """Raises ValueError."""
    if not all(0 <= share < math.inf for share in shares) or not 0 < sum(shares) < math.inf:
        raise ValueError(f"{name}={list(shares)} is not valid: each is at least 0, and one of them is above 0")


def _check_range(name: str, value: float | None, least: float, most: float) -> None:
    if value is not None and not least <= value <= most:  # also refuses NaN
        raise ValueError(f"{name}={value} is not valid: it must be from {least} to {most}")
