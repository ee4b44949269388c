"""Layout: runs in cells of a condition (which requests, which loop) and a setting (what is compared), by seed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean
from typing import TYPE_CHECKING

from tokenyard.errors import UserError, did_you_mean
from tokenyard.experiments.report.axes import axis_value, find_axes, is_load, is_loop, is_workload

if TYPE_CHECKING:
    from tokenyard.experiments.report.runs import Run

Point = tuple[str, ...]
"""Values on some axes."""


@dataclass(frozen=True)
class Layout:
    """All runs of a report. Runs are compared within a condition only, never across."""

    axes: tuple[str, ...]
    condition_axes: tuple[str, ...]
    setting_axes: tuple[str, ...]
    conditions: tuple[Point, ...]
    settings: tuple[Point, ...]  # the first is what the others are compared with
    cells: Mapping[tuple[Point, Point], Mapping[int, Run]]  # by seed; no empty ones

    def runs(self, condition: Point, setting: Point) -> Mapping[int, Run]:
        """By seed; empty where there are none."""
        return self.cells.get((condition, setting), {})

    def setting_label(self, setting: Point) -> str:
        return _label(self.setting_axes, setting) or "all runs"

    def condition_label(self, condition: Point) -> str:
        return _label(self.condition_axes, condition, is_named=True)

    @cached_property
    def families(self) -> Mapping[Point, tuple[Point, ...]]:
        """Conditions that differ in nothing but their load, by what they share; lowest load first."""
        shared = [number for number, axis in enumerate(self.condition_axes) if not is_load(axis)]
        found: dict[Point, list[Point]] = {}
        for condition in self.conditions:
            found.setdefault(tuple(condition[number] for number in shared), []).append(condition)
        return {family: tuple(sorted(members, key=self.load_of)) for family, members in found.items()}

    @property
    def family_axes(self) -> tuple[str, ...]:
        """Of conditions, without those of load."""
        return tuple(axis for axis in self.condition_axes if not is_load(axis))

    def family_label(self, family: Point) -> str:
        return _label(self.family_axes, family, is_named=True)

    @property
    def load_title(self) -> str:
        return "Requests at a time" if self.is_closed_loop else "Offered load (requests/s)"

    def load_of(self, condition: Point) -> float:
        """The place of a condition on the axis of load: requests a second, or at a time where loops are closed."""
        if self.is_closed_loop:
            return float(condition[self.condition_axes.index("workload.concurrency")])
        rates = [
            rate
            for setting in self.settings
            for run in self.runs(condition, setting).values()
            if (rate := run.digest.arrival_rate) is not None
        ]
        return fmean(rates) if rates else 0.0

    @property
    def is_closed_loop(self) -> bool:
        """Whether the load is a number of requests at a time."""
        if "workload.concurrency" not in self.condition_axes:
            return False
        number = self.condition_axes.index("workload.concurrency")
        return all(condition[number].isdecimal() for condition in self.conditions)


def make_layout(runs: Sequence[Run], *, baseline: str | None = None, mixes_loops: bool = False) -> Layout:
    """`baseline` is a setting as it is labelled, or KEY=VALUE. Raises UserError for one that there is not."""
    configured = [run.configured for run in runs]
    axes = find_axes(configured)
    condition_axes = tuple(axis for axis in axes if is_workload(axis) or (is_loop(axis) and not mixes_loops))
    setting_axes = tuple(axis for axis in axes if axis not in condition_axes)
    cells: dict[tuple[Point, Point], dict[int, Run]] = {}
    for run in runs:
        place = (_point(condition_axes, run), _point(setting_axes, run))
        cells.setdefault(place, {})[run.seed] = run
    settings = tuple(dict.fromkeys(setting for _, setting in cells))
    conditions = tuple(dict.fromkeys(condition for condition, _ in cells))
    if baseline is not None:
        first = _named(baseline, settings, setting_axes)
        settings = (first, *(setting for setting in settings if setting != first))
    return Layout(axes, condition_axes, setting_axes, conditions, settings, cells)


def _point(axes: Sequence[str], run: Run) -> Point:
    return tuple(axis_value(axis, run.configured) for axis in axes)


def _label(axes: Sequence[str], point: Point, *, is_named: bool = False) -> str:
    if len(axes) == 1 and not is_named:
        return point[0]
    return ", ".join(f"{axis.rpartition('.')[2]}={value}" for axis, value in zip(axes, point, strict=True))


def _named(baseline: str, settings: Sequence[Point], axes: Sequence[str]) -> Point:
    by_name: dict[str, Point] = {}
    tellers: tuple[Callable[[Point], str], ...] = (
        lambda setting: _label(axes, setting),
        lambda setting: ",".join(f"{axis}={value}" for axis, value in zip(axes, setting, strict=True)),
    )
    for tell in tellers:
        by_name |= {tell(setting): setting for setting in settings}
    if baseline not in by_name:
        known = "; ".join(by_name) or "none: all runs have one setting"
        raise UserError(
            f"--baseline '{baseline}': there is no such setting{did_you_mean(baseline, by_name)}; there is: {known}"
        )
    return by_name[baseline]
