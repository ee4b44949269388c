"""Means over seeds and differences between settings, with 95 % confidence intervals from Student's t."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import NormalDist, fmean, stdev

CONFIDENCE = 0.95
_ROUNDING = 1e-9
_MOST_EXPONENT = 700.0
_NORMAL = NormalDist().inv_cdf(0.5 + CONFIDENCE / 2)
# The 97.5 % quantiles of Student's t for 1 to 10 degrees of freedom, as every table of it has them.
_QUANTILES = (12.706205, 4.302653, 3.182446, 2.776445, 2.570582, 2.446912, 2.364624, 2.306004, 2.262157, 2.228139)


def student_t(degrees: int) -> float:
    """The 97.5 % quantile of Student's t distribution, within 1e-4; raises ValueError below one degree of freedom.

    From a table up to 10, then the expansion around the normal quantile by Cornish and Fisher (Abramowitz and Stegun,
    Handbook of Mathematical Functions, 26.7.5).
    """
    if degrees < 1:
        raise ValueError(f"Student's t needs at least one degree of freedom, got {degrees}")
    if degrees <= len(_QUANTILES):
        return _QUANTILES[degrees - 1]
    x = _NORMAL
    terms = (
        (x**3 + x) / 4,
        (5 * x**5 + 16 * x**3 + 3 * x) / 96,
        (3 * x**7 + 19 * x**5 + 17 * x**3 - 15 * x) / 384,
        (79 * x**9 + 776 * x**7 + 1482 * x**5 - 1920 * x**3 - 945 * x) / 92160,
    )
    return x + math.fsum(term / degrees ** (power + 1) for power, term in enumerate(terms))


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean of `count` values; `half_width` is that of its 95 % interval, None for a single value."""

    mean: float
    half_width: float | None
    count: int

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.mean + self.half_width


def estimate(values: Sequence[float]) -> Estimate:
    """The mean over seeds. The interval takes the values for independent and roughly normal."""
    mean = fmean(values)
    if len(values) < 2:
        return Estimate(mean, None, len(values))
    return Estimate(mean, student_t(len(values) - 1) * stdev(values) / math.sqrt(len(values)), len(values))


@dataclass(frozen=True, slots=True)
class Difference:
    """Paired by seed: `other` minus `base`, seed by seed."""

    base: float  # mean over the seeds that both have
    other: float
    difference: Estimate
    log_ratio: Estimate | None  # of the logarithms of other / base, seed by seed; None where not all are above 0

    @property
    def relative(self) -> float | None:
        """The mean difference as a share of the base's mean."""
        return None if self.base == 0 else self.difference.mean / abs(self.base)

    @property
    def ratio(self) -> tuple[float, float | None, float | None] | None:
        """The geometric mean of other / base, with the ends of its 95 % interval: fair to seeds of unequal load."""
        if self.log_ratio is None:
            return None
        low, high = self.log_ratio.low, self.log_ratio.high
        ends = (None, None) if low is None or high is None else (_exp(low), _exp(high))
        return (_exp(self.log_ratio.mean), *ends)

    @property
    def is_significant(self) -> bool | None:
        """Whether the interval leaves out 0; None where one seed gives no interval."""
        low, high = self.difference.low, self.difference.high
        return None if low is None or high is None else low > 0 or high < 0

    @property
    def verdict(self) -> str:
        """The result in words."""
        match self.is_significant:
            case None:
                return "one seed: no interval"
            case True:
                return "higher" if self.difference.mean > 0 else "lower"
            case False:
                if self.difference.mean == 0 and self.difference.half_width == 0:
                    return "equal"
                return "not significant"


def paired(base: Mapping[int, float], other: Mapping[int, float]) -> Difference | None:
    """Values by seed; seeds that one of them lacks are left out. None where they share no seed."""
    pairs = [(base[seed], other[seed]) for seed in sorted(base.keys() & other.keys())]
    if not pairs:
        return None
    difference = estimate([_minus(theirs, ours) for ours, theirs in pairs])
    is_positive = all(ours > 0 and theirs > 0 for ours, theirs in pairs)
    log_ratio = estimate([math.log(theirs / ours) for ours, theirs in pairs]) if is_positive else None
    return Difference(fmean(ours for ours, _ in pairs), fmean(theirs for _, theirs in pairs), difference, log_ratio)


def _minus(other: float, base: float) -> float:
    """Sums of the same numbers in another order are the same."""
    return 0.0 if math.isclose(other, base, rel_tol=_ROUNDING) else other - base


def _exp(value: float) -> float:
    return math.exp(value) if value < _MOST_EXPONENT else math.inf
