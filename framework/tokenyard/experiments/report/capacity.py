"""Goodput as DistServe defines it: the highest load at which enough requests meet their SLOs."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from tokenyard.experiments.metrics_goodput import ATTAINMENT as SHARE
from tokenyard.experiments.metrics_goodput import HighestRate, highest_rate
from tokenyard.experiments.report.measures import ATTAINMENT
from tokenyard.experiments.report.numbers import number_text
from tokenyard.experiments.report.tables import Cell, Table

if TYPE_CHECKING:
    from tokenyard.experiments.report.layout import Layout, Point


def capacity_table(layout: Layout) -> Table | None:
    """By setting, where there are several loads and SLOs; None where there are not, or loops are closed."""
    rows: list[tuple[Cell, ...]] = []
    shown = []
    for family, members in layout.families.items():
        if len(members) < 2:
            continue
        for setting in layout.settings:
            found = _highest(layout, members, setting)
            if found is None:
                continue
            rows.append((*family, *setting, found.rate, found.is_at_least))
            shown.append((*family, *setting, _told(found)))
    axes = (*layout.family_axes, *layout.setting_axes)
    percent = f"{100 * SHARE:g} %"
    columns = (*axes, "highest_rate", "is_at_least")
    title = f"Highest load with {percent} good requests (DistServe's goodput)"
    table = Table("capacity", title, columns, tuple(rows), (*axes, "requests/s"), tuple(shown))
    return table if rows else None


def _highest(layout: Layout, members: tuple[Point, ...], setting: Point) -> HighestRate | None:
    """From the mean rate and attainment of each load, over its seeds: windows of a trace differ in rate."""
    rates, shares = [], []
    for condition in members:
        values = [ATTAINMENT.of(run.metrics) for run in layout.runs(condition, setting).values()]
        known = [value for value in values if value is not None]
        if known:
            rates.append(layout.load_of(condition))
            shares.append(fmean(known))
    return None if not rates or layout.is_closed_loop else highest_rate(rates, shares)


def _told(found: HighestRate) -> str:
    if found.rate is None:
        return "below the lowest load"
    return f"{'at least ' if found.is_at_least else ''}{number_text(found.rate)}"
