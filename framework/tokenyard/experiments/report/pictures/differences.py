"""Differences to the first setting, paired by seed, with their intervals."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.experiments.report.measures import GOODPUT, THROUGHPUT, TPOT, TPOT_P99, TTFT, TTFT_P99
from tokenyard.experiments.report.pictures.style import COLOURS, GREY, INK, Picture, linear_axis, make_panels

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes

    from tokenyard.experiments.report.comparison import Comparison
    from tokenyard.experiments.report.layout import Layout

_MEASURES = (TTFT, TTFT_P99, TPOT, TPOT_P99, THROUGHPUT, GOODPUT)
_BETTER, _WORSE = COLOURS[0], COLOURS[1]
_MAX_ROWS = 40


def differences(layout: Layout, comparisons: Sequence[Comparison]) -> Picture | None:
    """None where there is nothing to compare."""
    by_measure = {one: [pair for pair in comparisons if pair.measure == one][:_MAX_ROWS] for one in _MEASURES}
    shown = [(measure, rows) for measure, rows in by_measure.items() if rows]
    if not shown:
        return None
    height = 0.22 * max(len(rows) for _, rows in shown) + 0.7
    figure, panels = make_panels(len(shown), columns=2, size=(4.2, max(height, 1.3)), shares=(False, False))
    for panel, (measure, rows) in zip(panels, shown, strict=True):
        _draw(panel, layout, rows)
        panel.set_title(f"{measure.label}: {measure.better.value}")
        panel.set_xlabel(f"Difference to {layout.setting_label(layout.settings[0])} ({measure.unit})")
    caption = (
        "Mean of the differences seed by seed, with its 95 % interval by Student's t. Blue: better. Orange: worse. "
        "Grey: not significant, the interval contains 0, or one seed gave no interval."
    )
    return Picture("differences", f"Differences to {layout.setting_label(layout.settings[0])}", caption, figure)


def _draw(panel: Axes, layout: Layout, rows: Sequence[Comparison]) -> None:
    panel.axvline(0, color=INK, linewidth=0.8)
    for number, one in enumerate(rows):
        colour = GREY if one.is_better is None else _BETTER if one.is_better else _WORSE
        found = one.difference.difference
        width = 0.0 if found.half_width is None else found.half_width
        panel.errorbar([found.mean], [number], xerr=[width], fmt="o", color=colour, markersize=4, linewidth=1.8)
    labels = [layout.setting_label(one.other) for one in rows]
    conditions = [layout.condition_label(one.condition) for one in rows]
    panel.set_yticks(
        range(len(rows)), [" · ".join(filter(None, pair)) for pair in zip(labels, conditions, strict=True)]
    )
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.grid(visible=False, axis="y")
    linear_axis(panel, "x")
