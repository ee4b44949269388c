"""Which lines go into which panel: few settings share one for each condition, many get one each."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tokenyard.experiments.report.pictures.style import GREY, MAX_LINES, MAX_PANELS, Look, look

if TYPE_CHECKING:
    from tokenyard.experiments.report.layout import Layout, Point


class Line(NamedTuple):
    """A setting in a panel."""

    setting: Point
    label: str
    look: Look
    is_background: bool  # drawn to compare with, not told by name


class Panel(NamedTuple):
    """A panel of one condition."""

    title: str
    condition: Point
    lines: tuple[Line, ...]  # background first


def conditions_by_load(layout: Layout) -> list[Point]:
    """Family by family, lowest load first."""
    return [condition for members in layout.families.values() for condition in members]


def busiest(layout: Layout) -> Point:
    """The condition of highest load; of equal ones the first."""
    return max(layout.conditions, key=layout.load_of)


def has_many(layout: Layout) -> bool:
    """Whether there are more settings than one panel can show."""
    return len(layout.settings) > MAX_LINES


def lines_of(layout: Layout, shown: Point | None = None) -> tuple[Line, ...]:
    """All settings, or one before all others in grey."""
    if shown is None:
        return tuple(
            Line(setting, layout.setting_label(setting), look(number), is_background=False)
            for number, setting in enumerate(layout.settings)
        )
    others = (setting for setting in layout.settings if setting != shown)
    background = [Line(one, layout.setting_label(one), Look(GREY, "-"), is_background=True) for one in others]
    return (*background, Line(shown, layout.setting_label(shown), look(0), is_background=False))


def panels_of(layout: Layout) -> list[Panel]:
    """At most MAX_PANELS: by condition, or by setting at the highest load."""
    if not has_many(layout):
        lines = lines_of(layout)
        conditions = conditions_by_load(layout)[-MAX_PANELS:]
        return [Panel(layout.condition_label(condition), condition, lines) for condition in conditions]
    condition = busiest(layout)
    settings = layout.settings[:MAX_PANELS]
    return [Panel(layout.setting_label(one), condition, lines_of(layout, one)) for one in settings]


def left_out(layout: Layout) -> str:
    """A sentence on what `panels_of` does not show; empty where it shows all."""
    if has_many(layout):
        number = len(layout.settings) - MAX_PANELS
        at = f" at {label}" if (label := layout.condition_label(busiest(layout))) else ""
        return f" One panel a setting{at}, the others in grey." + (
            f" {number} more are not shown." if number > 0 else ""
        )
    number = len(layout.conditions) - MAX_PANELS
    return f" {number} conditions of lower load are not shown." if number > 0 else ""
