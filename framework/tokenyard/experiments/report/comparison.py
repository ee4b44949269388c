"""Comparison: each setting against the first one, within a condition, paired by seed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.experiments.report.measures import Better, Measure
from tokenyard.experiments.report.statistics import Difference, paired

if TYPE_CHECKING:
    from tokenyard.experiments.report.layout import Layout, Point
    from tokenyard.experiments.report.runs import Run


@dataclass(frozen=True, slots=True)
class Comparison:
    """One measure of two settings under one condition, in the unit that is shown."""

    condition: Point
    base: Point
    other: Point
    measure: Measure
    difference: Difference

    @property
    def is_better(self) -> bool | None:
        """Of the other setting; None where the difference is not significant or neither way is good."""
        if not self.difference.is_significant or self.measure.better is Better.NEITHER:
            return None
        return (self.difference.difference.mean > 0) is (self.measure.better is Better.HIGHER)

    @property
    def verdict(self) -> str:
        """In words: `lower (better)`, `not significant`, `one seed: no interval`."""
        words = self.difference.verdict
        return words if self.is_better is None else f"{words} ({'better' if self.is_better else 'worse'})"


def compare(layout: Layout, measures: tuple[Measure, ...]) -> tuple[list[Comparison], list[str]]:
    """All comparisons, and notes on runs that could not be paired."""
    found: list[Comparison] = []
    notes: list[str] = []
    for condition in layout.conditions:
        base = layout.settings[0]
        for other in layout.settings[1:]:
            pairs, unlike = _pairs(layout.runs(condition, base), layout.runs(condition, other))
            if unlike:
                names = f"{layout.setting_label(base)} and {layout.setting_label(other)}"
                where = f" at {label}" if (label := layout.condition_label(condition)) else ""
                notes.append(f"{names}{where} served other requests with seed {unlike}: not compared")
            found += (
                Comparison(condition, base, other, measure, difference)
                for measure in measures
                if (difference := _difference(pairs, measure)) is not None
            )
    return found, notes


def _pairs(base: Mapping[int, Run], other: Mapping[int, Run]) -> tuple[dict[int, tuple[Run, Run]], str]:
    """The runs of each shared seed, and the seeds whose requests differ."""
    shared = {seed: (base[seed], other[seed]) for seed in sorted(base.keys() & other.keys())}
    alike = {seed: pair for seed, pair in shared.items() if pair[0].digest.requests_key == pair[1].digest.requests_key}
    return alike, ", ".join(str(seed) for seed in shared if seed not in alike)


def _difference(pairs: Mapping[int, tuple[Run, Run]], measure: Measure) -> Difference | None:
    base, other = (dict(_values(pairs, measure, number)) for number in (0, 1))
    return paired(base, other)


def _values(pairs: Mapping[int, tuple[Run, Run]], measure: Measure, number: int) -> Iterator[tuple[int, float]]:
    for seed, pair in pairs.items():
        if (value := measure.of(pair[number].metrics)) is not None:
            yield seed, value * measure.scale
