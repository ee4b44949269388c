"""Tables of a report: the same cells as Markdown and CSV for people, and as Parquet with numbers as numbers."""

from __future__ import annotations

import csv
import importlib.util
import io
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.experiments.report.measures import HEADLINES, MEASURES, Measure
from tokenyard.experiments.report.numbers import estimate_text, number_text, percent_text, ratio_text
from tokenyard.experiments.report.statistics import estimate

if TYPE_CHECKING:
    from tokenyard.experiments.report.comparison import Comparison
    from tokenyard.experiments.report.layout import Layout
    from tokenyard.experiments.report.runs import Run

Cell = str | int | float | None


@dataclass(frozen=True, slots=True)
class Table:
    """`rows` are for programs, `shown` for people; each with column names of its own."""

    name: str  # of its files
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    shown_columns: tuple[str, ...]
    shown: tuple[tuple[str, ...], ...]


def known_measures(runs: Sequence[Run]) -> tuple[Measure, ...]:
    """Those that at least one run has a value for."""
    return tuple(one for one in MEASURES if any(_is_told(one, run) for run in runs))


def runs_table(layout: Layout, measures: Sequence[Measure], root: Path) -> Table:
    """One row a run."""
    rows, shown = [], []
    for (condition, setting), runs in layout.cells.items():
        for seed, run in sorted(runs.items()):
            values = [_scaled(measure, run) for measure in measures]
            folder = str(run.folder.relative_to(root))
            rows.append((*condition, *setting, seed, *values, folder))
            shown.append((*condition, *setting, str(seed), *map(number_text, values), folder))
    axes = (*layout.condition_axes, *layout.setting_axes, "seed")
    names, titles = (one.name for one in measures), (one.title for one in measures)
    return Table("runs", "Every run", (*axes, *names, "folder"), tuple(rows), (*axes, *titles, "folder"), tuple(shown))


def settings_table(layout: Layout, measures: Sequence[Measure]) -> Table:
    """Means over seeds, with 95 % intervals where there are two seeds or more."""
    rows, shown = [], []
    for (condition, setting), runs in layout.cells.items():
        cells: list[Cell] = []
        texts = []
        for measure in measures:
            values = [value for run in runs.values() if (value := _scaled(measure, run)) is not None]
            found = estimate(values) if values else None
            cells += (None, None) if found is None else (found.mean, found.half_width)
            texts.append(estimate_text(found))
        rows.append((*condition, *setting, len(runs), *cells))
        shown.append((*condition, *setting, str(len(runs)), *texts))
    axes = (*layout.condition_axes, *layout.setting_axes, "seeds")
    columns = [name for one in measures for name in (f"{one.name}", f"{one.name}_ci95")]
    titles = [one.title for one in measures]
    title = "Means over seeds, ± half of the 95 % interval"
    return Table("settings", title, (*axes, *columns), tuple(rows), (*axes, *titles), tuple(shown))


_COMPARED = ("measure", "unit", "base", "other", "base_mean", "other_mean", "difference", "ci95_low", "ci95_high")
_COMPARED_ENDS = ("relative", "ratio", "ratio_ci95_low", "ratio_ci95_high", "seeds", "verdict")
_COMPARED_SHOWN = ("measure", "compared", "base", "other", "difference", "relative", "ratio (95 %)", "seeds", "verdict")


def comparison_table(layout: Layout, comparisons: Sequence[Comparison]) -> Table:
    """Differences to the first setting, paired by seed."""
    rows, shown = [], []
    for one in comparisons:
        base, other = layout.setting_label(one.base), layout.setting_label(one.other)
        found, difference = one.difference, one.difference.difference
        values = (found.base, found.other, difference.mean, difference.low, difference.high)
        ends = (found.relative, *(found.ratio or (None, None, None)), difference.count, one.verdict)
        rows.append((*one.condition, one.measure.name, one.measure.unit, base, other, *values, *ends))
        means = (number_text(found.base), number_text(found.other), estimate_text(difference, is_signed=True))
        told = (percent_text(found.relative), ratio_text(found.ratio), str(difference.count), one.verdict)
        shown.append((*one.condition, one.measure.title, f"{other} minus {base}", *means, *told))
    axes = layout.condition_axes
    columns = (*axes, *_COMPARED, *_COMPARED_ENDS)
    title = "Differences, paired by seed, ± half of the 95 % interval"
    return Table("comparison", title, columns, tuple(rows), (*axes, *_COMPARED_SHOWN), tuple(shown))


def headlines(comparisons: Table) -> Table:
    """The rows of a comparison that people ask for first."""
    number = comparisons.shown_columns.index("measure")
    titles = {one.title for one in HEADLINES}
    rows = tuple(row for row in comparisons.shown if row[number] in titles)
    return replace(comparisons, shown=rows)


def markdown(table: Table) -> str:
    """A table as code hosts show it."""
    lines = [*map(markdown_line, (table.shown_columns, ["---"] * len(table.shown_columns), *table.shown))]
    return "\n".join(lines) + "\n"


def csv_text(table: Table) -> str:
    """Numbers as short as they can be read back exactly; empty where there is none."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(table.columns)
    writer.writerows(table.rows)
    return file.getvalue()


def can_write_parquet() -> bool:
    """Whether pyarrow, of the extra `experiments`, is installed."""
    return importlib.util.find_spec("pyarrow") is not None


def write_parquet(table: Table, path: Path) -> None:
    """A column has one type; one without any value is of type null."""
    import pyarrow  # of an extra
    import pyarrow.parquet

    columns = {name: [row[number] for row in table.rows] for number, name in enumerate(table.columns)}
    pyarrow.parquet.write_table(pyarrow.table(columns), path)


def _is_told(measure: Measure, run: Run) -> bool:
    value = measure.of(run.metrics)
    return value is not None and (measure.is_told_at_zero or value != 0)


def _scaled(measure: Measure, run: Run) -> float | None:
    value = measure.of(run.metrics)
    return None if value is None else value * measure.scale


def markdown_line(cells: Sequence[str]) -> str:
    """A row of a table; of a cell's text nothing ends it early, and none is taken for HTML."""
    plain = (" ".join(cell.replace("|", "\\|").replace("<", "&lt;").split()) for cell in cells)
    return f"| {' | '.join(plain)} |"


def aligned(table: Table) -> str:
    """A table for terminals."""
    rows = (table.shown_columns, *table.shown)
    widths = [max(len(row[number]) for row in rows) for number in range(len(table.shown_columns))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
