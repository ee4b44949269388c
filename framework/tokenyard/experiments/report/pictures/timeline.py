"""What steps tell over time: K/V blocks in use and requests that wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.experiments.report.pictures.panels import has_many, left_out, lines_of, panels_of
from tokenyard.experiments.report.pictures.style import Picture, key, label_outer, linear_axis, make_panels

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    from numpy.typing import NDArray

    from tokenyard.experiments.report.digest import Load
    from tokenyard.experiments.report.layout import Layout, Point


def kv_usage(layout: Layout) -> Picture | None:
    """None where no run kept its steps."""
    return _over_time(
        layout, "kv_usage", "KV blocks over time", "KV blocks held", lambda one: one.mean_blocks, is_shared=True
    )


def waiting(layout: Layout) -> Picture | None:
    """None where no run kept its steps."""
    return _over_time(
        layout, "waiting", "Requests that wait", "Requests waiting", lambda one: one.mean_waiting, is_shared=False
    )


def _over_time(
    layout: Layout,
    name: str,
    title: str,
    axis: str,
    values: Callable[[Load], NDArray[np.float64]],
    *,
    is_shared: bool,
) -> Picture | None:
    """`is_shared` is whether all panels have one scale: waiting lines of different loads have none in common."""
    panels = [one for one in panels_of(layout) if any(_load(layout, one.condition, line.setting) for line in one.lines)]
    if not panels:
        return None
    figure, places = make_panels(len(panels), shares=(False, is_shared))
    for place, panel in zip(places, panels, strict=True):
        for line in panel.lines:
            if (load := _load(layout, panel.condition, line.setting)) is not None:
                width = 0.6 if line.is_background else 1.2
                look = line.look
                place.plot(load.times, values(load), color=look.colour, linestyle=look.dash, linewidth=width)
        place.set_title(panel.title)
        linear_axis(place, "x")
        linear_axis(place, "y")
    for place in places:  # behind all lines: a limit ends the search for one that fits them
        place.set_ylim(bottom=0)
    label_outer(places, "Time (s)", axis)
    if not has_many(layout):
        key(figure, [(line.label, line.look) for line in lines_of(layout)])
    caption = f"Means of the steps in {len(load_times(layout))} equal parts of a run, first seed.{left_out(layout)}"
    return Picture(name, title, caption, figure)


def load_times(layout: Layout) -> NDArray[np.float64]:
    """Of the first run that has some."""
    found = (_load(layout, *cell) for cell in layout.cells)
    return next(load.times for load in found if load is not None)


def _load(layout: Layout, condition: Point, setting: Point) -> Load | None:
    runs = layout.runs(condition, setting)
    return runs[min(runs)].digest.load if runs else None
