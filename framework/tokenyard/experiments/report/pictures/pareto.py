"""Pareto fronts: which settings no other one beats in both of two measures."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.experiments.report.measures import GOODPUT, THROUGHPUT, TPOT_P99, TTFT, Measure
from tokenyard.experiments.report.pictures.panels import conditions_by_load
from tokenyard.experiments.report.pictures.style import (
    GREY,
    INK,
    MAX_PANELS,
    Picture,
    is_wide,
    label_outer,
    label_points,
    linear_axis,
    log_axis,
    look,
    make_panels,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from tokenyard.experiments.report.layout import Layout, Point


class Place(NamedTuple):
    """A setting's means: `gain` is better when higher, `cost` when lower."""

    gain: float
    cost: float
    label: str
    number: int


def front(places: Sequence[Place]) -> list[Place]:
    """Those that no other one beats in both, by gain; one that is equal to another in both stays."""
    return sorted(
        one
        for one in places
        if not any(
            other.gain >= one.gain and other.cost <= one.cost and (other.gain, other.cost) != (one.gain, one.cost)
            for other in places
        )
    )


def ttft_throughput(layout: Layout) -> Picture | None:
    """None with fewer than two settings."""
    return _pareto(layout, "pareto_ttft_throughput", THROUGHPUT, TTFT)


def tpot_goodput(layout: Layout) -> Picture | None:
    """None without SLOs, or as above."""
    return _pareto(layout, "pareto_tpot_goodput", GOODPUT, TPOT_P99)


def _pareto(layout: Layout, name: str, gain: Measure, cost: Measure) -> Picture | None:
    by_condition = {condition: _places(layout, condition, gain, cost) for condition in conditions_by_load(layout)}
    shown = [(condition, places) for condition, places in by_condition.items() if len(places) > 1][-MAX_PANELS:]
    if not shown:
        return None
    figure, panels = make_panels(len(shown), size=(3.4, 2.8), shares=(False, False))
    for panel, (condition, places) in zip(panels, shown, strict=True):
        _draw(panel, places)
        panel.set_title(layout.condition_label(condition))
    labels = [[(one.gain, one.cost, one.label, look(one.number).colour) for one in places] for _, places in shown]
    label_points(figure, list(zip(panels, labels, strict=True)))
    label_outer(panels, gain.title, cost.title)
    caption = (
        "Means over seeds. Right and below is better; the line joins the settings that no other one beats in both, the "
        "others are hollow."
    )
    return Picture(name, f"{cost.label} against {gain.label.lower()}", caption, figure)


def _places(layout: Layout, condition: Point, gain: Measure, cost: Measure) -> list[Place]:
    found = []
    for number, setting in enumerate(layout.settings):
        runs = layout.runs(condition, setting).values()
        pairs = [(gain.of(run.metrics), cost.of(run.metrics)) for run in runs]
        known = [(x * gain.scale, y * cost.scale) for x, y in pairs if x is not None and y is not None]
        if known:
            means = fmean(x for x, _ in known), fmean(y for _, y in known)
            found.append(Place(*means, layout.setting_label(setting), number))
    return found


def _draw(panel: Axes, places: Sequence[Place]) -> None:
    best = front(places)
    panel.plot([one.gain for one in best], [one.cost for one in best], color=GREY, linewidth=1.2, zorder=1)
    for one in places:
        colour = look(one.number).colour
        face = colour if one in best else "white"
        panel.plot([one.gain], [one.cost], "o", color=colour, markerfacecolor=face, markersize=6, zorder=2)
    (log_axis if is_wide([one.cost for one in places]) else linear_axis)(panel, "y")
    linear_axis(panel, "x")
    panel.margins(0.22)
    panel.text(0.99, 0.02, "better ↘", transform=panel.transAxes, ha="right", color=INK, fontsize=8)
