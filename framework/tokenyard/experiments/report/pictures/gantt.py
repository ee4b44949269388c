"""Gantt: when requests waited, were prefilled and decoded."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.experiments.report.pictures.panels import busiest
from tokenyard.experiments.report.pictures.style import (
    COLOURS,
    FAINT,
    GREY,
    Look,
    Picture,
    key,
    label_outer,
    linear_axis,
    make_panels,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from tokenyard.experiments.report.digest import Gantt
    from tokenyard.experiments.report.layout import Layout

_MAX_PANELS = 6
_PHASES = (("waits", GREY), ("prefill", COLOURS[1]), ("decode", COLOURS[0]))


def gantt(layout: Layout) -> Picture | None:
    """None where the busiest condition has no requests."""
    condition = busiest(layout)
    found = []
    for setting in layout.settings:
        runs = layout.runs(condition, setting)
        if runs and len((shown := runs[min(runs)].digest.gantt).ids):
            found.append((layout.setting_label(setting), shown))
    if not found:
        return None
    found = found[:_MAX_PANELS]
    figure, panels = make_panels(len(found), size=(3.6, 3.6), shares=(True, False))
    for panel, (label, shown) in zip(panels, found, strict=True):
        _draw(panel, shown)
        panel.set_title(label)
    label_outer(panels, "Time (s)", "Request (by arrival)")
    key(figure, [(name, Look(colour, "-")) for name, colour in _PHASES])
    where = f" at {label}" if (label := layout.condition_label(condition)) else ""
    caption = (
        f"{len(found[0][1].ids)} requests that arrived one after the other, in the densest burst of arrivals{where}, "
        "first seed. A number right of a bar: how often it was preempted; an open end: it did not finish."
    )
    if len(layout.settings) > _MAX_PANELS:
        caption += f" The first {_MAX_PANELS} settings."
    return Picture("gantt", "Requests over time", caption, figure)


def _draw(panel: Axes, shown: Gantt) -> None:
    rows = np.arange(len(shown.ids))
    end = np.nanmax(np.concatenate((shown.finish, shown.first_token, shown.arrival)))
    scheduled = np.where(np.isnan(shown.first_scheduled), shown.first_token, shown.first_scheduled)
    times = (shown.arrival, scheduled, shown.first_token, shown.finish)
    ends = [np.where(np.isnan(time), end, time) for time in times]
    for (_, colour), begins, stops in zip(_PHASES, ends, ends[1:], strict=False):
        _bars(panel, rows, begins, stops, colour)
    for row in np.flatnonzero(shown.preemptions > 0):
        panel.annotate(
            str(shown.preemptions[row]),
            (ends[-1][row], row),
            (2, 0),
            textcoords="offset points",
            va="center",
            fontsize=6,
        )
    panel.set_ylim(len(rows) - 0.4, -0.6)
    panel.set_yticks([0, len(rows) - 1], [f"{shown.ids[0]:,}", f"{shown.ids[-1]:,}"])
    panel.grid(visible=False, axis="y")
    linear_axis(panel, "x")


def _bars(
    panel: Axes, rows: NDArray[np.int64], begins: NDArray[np.float64], ends: NDArray[np.float64], colour: str
) -> None:
    panel.barh(
        rows, np.maximum(ends - begins, 0.0), left=begins, height=0.75, color=colour, edgecolor=FAINT, linewidth=0.1
    )
