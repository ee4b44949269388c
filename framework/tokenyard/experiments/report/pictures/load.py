"""Measures against load: latency and goodput, a panel each."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING

from tokenyard.experiments.report.measures import ATTAINMENT, GOODPUT, TPOT, TPOT_P99, TTFT, TTFT_P99, Measure
from tokenyard.experiments.report.pictures.panels import Line, has_many, lines_of
from tokenyard.experiments.report.pictures.style import (
    INK,
    MAX_PANELS,
    Label,
    Picture,
    is_wide,
    label_ends,
    linear_axis,
    log_axis,
    make_panels,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from tokenyard.experiments.report.layout import Layout, Point
    from tokenyard.experiments.report.runs import Run

_OF_MANY = (TTFT, TPOT_P99, GOODPUT, ATTAINMENT)  # what is shown of settings that get a panel each
_ATTAINED = 90  # percent, that DistServe asks for


def latency_against_load(layout: Layout) -> Picture | None:
    """None where no condition differs from another in its load."""
    return _against_load(layout, "latency_load", "Latency against load", (TTFT, TTFT_P99, TPOT, TPOT_P99))


def goodput_against_load(layout: Layout) -> Picture | None:
    """None without SLOs, or as above."""
    return _against_load(layout, "goodput_load", "Goodput against load", (GOODPUT, ATTAINMENT))


def _against_load(layout: Layout, name: str, title: str, measures: Sequence[Measure]) -> Picture | None:
    measures = [one for one in measures if any(one.of(run.metrics) is not None for run in _all_runs(layout))]
    families = [family for family, members in layout.families.items() if len(members) > 1]
    if not measures or not families:
        return None
    shown: tuple[Point | None, ...] = layout.settings if has_many(layout) else (None,)
    if has_many(layout):
        measures = [one for one in measures if one in _OF_MANY]
    places = [(family, one, measure) for family in families for one in shown for measure in measures][:MAX_PANELS]
    columns, size = (4, (2.7, 2.0)) if has_many(layout) else (2, (3.7, 2.6))
    figure, panels = make_panels(len(places), columns=columns, size=size, shares=(False, False))
    labels = []
    for panel, (family, one, measure) in zip(panels, places, strict=True):
        labels.append((panel, _draw(panel, layout, layout.families[family], measure, lines_of(layout, one))))
        named = [layout.family_label(family), "" if one is None else layout.setting_label(one), measure.label]
        panel.set_title(" · ".join(text for text in named if text))
    label_ends(figure, labels)
    caption = "A dot is a run, a line joins the means over seeds. Differences are judged seed by seed, not by the dots."
    if ATTAINMENT in measures:
        caption += f" The thin line is at {_ATTAINED} %."
    return Picture(name, title, caption, figure)


def _all_runs(layout: Layout) -> list[Run]:
    return [run for runs in layout.cells.values() for run in runs.values()]


def _draw(
    panel: Axes, layout: Layout, members: Sequence[Point], measure: Measure, lines: Sequence[Line]
) -> list[Label]:
    """Returns what the lines are to be named with."""
    ends: list[Label] = []
    everything: list[float] = []
    for number, line in enumerate(lines):
        points = [(layout.load_of(one), values) for one in members if (values := _values(layout, one, line, measure))]
        if not points:
            continue
        loads, means = [load for load, _ in points], [fmean(values) for _, values in points]
        colour = line.look.colour
        panel.plot(loads, means, color=colour, linestyle=line.look.dash, linewidth=_width(line, number))
        for load, values in () if line.is_background else points:
            panel.plot([load] * len(values), values, "o", color=colour, markersize=3, alpha=0.45, markeredgewidth=0)
        everything += [value for _, values in points for value in values]
        if not line.is_background:
            ends.append((loads[-1], means[-1], line.label, colour))
    linear_axis(panel, "x")
    if is_wide(everything) and measure is not ATTAINMENT:
        log_axis(panel, "y")
    else:
        linear_axis(panel, "y")
        panel.set_ylim(bottom=0)
    if measure is ATTAINMENT:
        panel.axhline(_ATTAINED, color=INK, linewidth=0.6)
        panel.set_ylim(0, 105)
    panel.set_xlabel(layout.load_title)
    panel.set_ylabel(measure.title)
    return ends


def _width(line: Line, number: int) -> float:
    """Later lines are thinner, so that equal ones show each other."""
    return 0.8 if line.is_background else max(1.0, 2.8 - 0.5 * number)


def _values(layout: Layout, condition: Point, line: Line, measure: Measure) -> list[float]:
    found = (measure.of(run.metrics) for run in layout.runs(condition, line.setting).values())
    return [value * measure.scale for value in found if value is not None]
