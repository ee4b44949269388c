"""The page of a report: one HTML file that needs no other, and no network."""

from __future__ import annotations

import base64
import functools
import importlib.resources
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.experiments.report.axes import common_overrides
from tokenyard.experiments.summary import told_origin

if TYPE_CHECKING:
    from jinja2 import Template

    from tokenyard.experiments.report.layout import Layout
    from tokenyard.experiments.report.tables import Table

_FACTS = ("tokenyard", "plugin_api", "commit", "engine", "executor", "target", "python", "numpy")


@dataclass(frozen=True, slots=True)
class Shown:
    """A picture as the page has it."""

    name: str
    title: str
    caption: str
    path: Path  # of an SVG

    @property
    def data(self) -> str:
        """As an address: an image that is loaded so runs no script, whatever is written in it."""
        return "data:image/svg+xml;base64," + base64.b64encode(self.path.read_bytes()).decode("ascii")


def page(title: str, layout: Layout, tables: Sequence[Table], pictures: Sequence[Shown], notes: Sequence[str]) -> str:
    """Every text from outside is escaped."""
    cells = layout.cells.values()
    return _template().render(
        title=title,
        num_runs=sum(len(runs) for runs in cells),
        axes=[(axis, _values(layout, axis)) for axis in layout.axes],
        seeds=sorted({seed for runs in cells for seed in runs}),
        notes=notes,
        tables=tables,
        pictures=pictures,
        facts=facts_of(layout),
    )


@functools.cache
def _template() -> Template:
    from jinja2 import Environment

    text = importlib.resources.files(__package__).joinpath("page.html.jinja").read_text(encoding="utf-8")
    return Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True).from_string(text)


def _values(layout: Layout, axis: str) -> list[str]:
    for axes, points in ((layout.condition_axes, layout.conditions), (layout.setting_axes, layout.settings)):
        if axis in axes:
            return list(dict.fromkeys(point[axes.index(axis)] for point in points))
    return []


def facts_of(layout: Layout) -> list[tuple[str, list[str]]]:
    """What all runs say of themselves, each value once; and the overrides that all of them were given."""
    runs = [run for cell in layout.cells.values() for run in cell.values()]
    found: dict[str, dict[str, None]] = {}
    for run in runs:
        for name, value in _told(run.facts):
            found.setdefault(name, {})[value] = None
    given = common_overrides([run.configured for run in runs])
    return [*((name, list(values)) for name, values in found.items()), *([("every run", [given])] if given else [])]


def _told(facts: Mapping[str, object]) -> list[tuple[str, str]]:
    told = [(name, str(facts[name])) for name in _FACTS if facts.get(name) is not None]
    return told + [(group, text) for group in ("workload", "latency") if (text := told_origin(facts, group))]
