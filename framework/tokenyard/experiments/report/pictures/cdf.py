"""How a time is distributed over requests: CDFs of TTFT and TPOT."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.experiments.report.digest import LEVELS
from tokenyard.experiments.report.pictures.panels import Panel, has_many, left_out, lines_of, panels_of
from tokenyard.experiments.report.pictures.style import (
    Picture,
    is_wide,
    key,
    label_outer,
    linear_axis,
    log_axis,
    make_panels,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    from tokenyard.experiments.report.digest import Digest
    from tokenyard.experiments.report.layout import Layout, Point

_SHOWN = slice(2, -2)  # levels of 0.5 to 99.5 %: a single request does not stretch the axis


def ttft_cdf(layout: Layout) -> Picture | None:
    """None where no request got a token."""
    return _cdf(layout, "cdf_ttft", "Time to first token", "TTFT (s)", lambda one: one.ttft)


def tpot_cdf(layout: Layout) -> Picture | None:
    """None where no request got two tokens."""
    return _cdf(layout, "cdf_tpot", "Time per output token", "TPOT (ms)", lambda one: 1e3 * one.tpot)


def _cdf(
    layout: Layout, name: str, title: str, axis: str, times: Callable[[Digest], NDArray[np.float64]]
) -> Picture | None:
    curves = {cell: curve for cell in layout.cells if (curve := _curves(layout, cell, times)) is not None}
    panels = [one for one in panels_of(layout) if any((one.condition, line.setting) in curves for line in one.lines)]
    if not panels:
        return None
    figure, places = make_panels(len(panels))
    values = np.concatenate([curve[:, _SHOWN].ravel() for curve in curves.values()])
    for place, panel in zip(places, panels, strict=True):
        _draw(place, panel, curves)
        (log_axis if is_wide(values.tolist()) else linear_axis)(place, "x")
    label_outer(places, axis, "Requests (%)")
    if not has_many(layout):
        key(figure, [(line.label, line.look) for line in lines_of(layout)])
    caption = (
        "Share of the requests that waited no longer, 0.5 to 99.5 %: all seeds together, and each seed as a thin line."
        f"{left_out(layout)}"
    )
    return Picture(name, title, caption, figure)


def _curves(
    layout: Layout, cell: tuple[Point, Point], times: Callable[[Digest], NDArray[np.float64]]
) -> NDArray[np.float64] | None:
    found = [curve for run in layout.cells[cell].values() if len(curve := times(run.digest))]
    return np.stack(found) if found else None


def _draw(place: Axes, panel: Panel, curves: dict[tuple[Point, Point], NDArray[np.float64]]) -> None:
    levels = 100 * LEVELS[_SHOWN]
    for line in panel.lines:
        curve = curves.get((panel.condition, line.setting))
        if curve is None:
            continue
        pooled = np.quantile(curve, LEVELS)[_SHOWN]
        width = 0.8 if line.is_background else 1.8
        place.plot(pooled, levels, color=line.look.colour, linestyle=line.look.dash, linewidth=width)
        for seed in () if line.is_background or len(curve) < 2 else curve[:, _SHOWN]:
            place.plot(seed, levels, color=line.look.colour, linewidth=0.7, alpha=0.4)
    place.set_title(panel.title)
    place.set_ylim(0, 100)
