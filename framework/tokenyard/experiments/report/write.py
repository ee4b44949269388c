"""write_report: everything that is made of the runs below a folder."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenyard.errors import UserError
from tokenyard.experiments.report.capacity import capacity_table
from tokenyard.experiments.report.comparison import compare
from tokenyard.experiments.report.layout import Layout, make_layout
from tokenyard.experiments.report.page import Shown, facts_of, page
from tokenyard.experiments.report.runs import FoundRuns, find_runs
from tokenyard.experiments.report.tables import (
    Table,
    can_write_parquet,
    comparison_table,
    csv_text,
    known_measures,
    markdown,
    markdown_line,
    runs_table,
    settings_table,
    write_parquet,
)

REPORT = "report"
"""The folder of a report within that of its runs."""
PAGE, MARKDOWN = "report.html", "report.md"
_MARK = ".tokenyard-report"  # stands in a folder that a report may write over
_EXTRA = "pip install 'tokenyard[experiments]'"


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What was written."""

    folder: Path
    layout: Layout
    tables: tuple[Table, ...]
    pictures: tuple[str, ...]  # names, of PNG and SVG files
    files: tuple[Path, ...]
    notes: tuple[str, ...]

    def table(self, name: str) -> Table | None:
        """One by its name; None where there was nothing to put into it."""
        return next((one for one in self.tables if one.name == name), None)


def write_report(
    root: Path,
    *,
    to: Path | None = None,
    baseline: str | None = None,
    mixes_loops: bool = False,
    has_pictures: bool = True,
    on_run: Callable[[], None] = lambda: None,
) -> Report:
    """Read all runs below `root` and write tables, pictures and a page into `to`, else `root/report`.

    An earlier report there is replaced. Without matplotlib there are no pictures and without pyarrow no Parquet, which
    a note tells. Raises UserError for a folder without runs, a damaged run, a `to` that holds something else.
    """
    folder = root / REPORT if to is None else to
    found = find_runs(root, left_out=folder, on_run=on_run)
    layout = make_layout(found.runs, baseline=baseline, mixes_loops=mixes_loops)
    measures = known_measures(found.runs)
    comparisons, pair_notes = compare(layout, measures)
    tables = [settings_table(layout, measures), runs_table(layout, measures, root)]
    if comparisons:
        tables.insert(0, comparison_table(layout, comparisons))
    if (capacity := capacity_table(layout)) is not None:
        tables.insert(1, capacity)
    notes = [*found.notes, *pair_notes, *_reading_notes(found, layout), *_missing_notes(has_pictures=has_pictures)]
    _make_folder(folder)
    files = [path for table in tables for path in _write_table(table, folder)]
    pictures: list[Shown] = []
    if has_pictures and _has_matplotlib():
        from tokenyard.experiments.report.pictures.gallery import write_pictures  # imports matplotlib, of an extra

        made = write_pictures(layout, comparisons, folder)
        pictures = [Shown(one.name, one.title, one.caption, folder / f"{one.name}.svg") for one in made]
        files += [folder / f"{one.name}.{kind}" for one in pictures for kind in ("png", "svg")]
    files += _write_pages(folder, root, layout, tables, pictures, notes)
    names = tuple(one.name for one in pictures)
    return Report(
        folder=folder, layout=layout, tables=tuple(tables), pictures=names, files=tuple(files), notes=tuple(notes)
    )


def _has_matplotlib() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _missing_notes(*, has_pictures: bool) -> list[str]:
    notes = []
    if has_pictures and not _has_matplotlib():
        notes.append(f"no pictures: matplotlib is not installed; {_EXTRA}")
    if not can_write_parquet():
        notes.append(f"no Parquet files: pyarrow is not installed; {_EXTRA}")
    return notes


def _reading_notes(found: FoundRuns, layout: Layout) -> list[str]:
    """What a reader must know to judge the figures."""
    notes = []
    if any("goodput" in run.metrics and run.metrics["goodput"] is None for run in found.runs):
        notes.append("no goodput for runs without SLOs: experiment.slo.ttft=500ms experiment.slo.tpot=50ms")
    loops = {str(run.facts.get("engine")) for run in found.runs}
    if len(loops) > 1 and "engine" in layout.condition_axes:
        notes.append(f"runs of different engine loops ({', '.join(sorted(loops))}) are not compared; --mix-loops does")
    if len(layout.settings) == 1:
        notes.append("nothing to compare: all runs have one setting")
    elif all(len(runs) == 1 for runs in layout.cells.values()):
        notes.append("one seed: no intervals; repeat with more seeds to tell a difference from chance: seed=1,2,3")
    return notes


def _make_folder(folder: Path) -> None:
    """An empty folder; only an earlier report is removed for it."""
    if folder.exists():
        if not folder.is_dir() or (any(folder.iterdir()) and not (folder / _MARK).is_file()):
            raise UserError(f"{folder}: is there already, and is no report; give another folder with --to")
        shutil.rmtree(folder)
    folder.mkdir(parents=True)
    (folder / _MARK).touch()


def _write_table(table: Table, folder: Path) -> list[Path]:
    texts = {"md": markdown(table), "csv": csv_text(table)}
    paths = []
    for kind, text in texts.items():
        paths.append(folder / f"{table.name}.{kind}")
        paths[-1].write_text(text, encoding="utf-8")
    if can_write_parquet():
        paths.append(folder / f"{table.name}.parquet")
        write_parquet(table, paths[-1])
    return paths


def _write_pages(
    folder: Path,
    root: Path,
    layout: Layout,
    tables: Sequence[Table],
    pictures: Sequence[Shown],
    notes: Sequence[str],
) -> list[Path]:
    title = f"Report on {root.resolve().name}"
    html, text = folder / PAGE, folder / MARKDOWN
    html.write_text(page(title, layout, tables, pictures, notes), encoding="utf-8")
    parts = [f"# {title}\n"]
    parts += [f"- {note}\n" for note in notes]
    parts += [f"\n## {table.title}\n\n{markdown(table)}" for table in tables]
    parts += [f"\n## {one.title}\n\n![{one.title}]({one.name}.png)\n\n{one.caption}\n" for one in pictures]
    parts.append("\n## How the runs were made\n\n| | |\n| --- | --- |\n")
    parts += [f"{markdown_line((name, '; '.join(values)))}\n" for name, values in facts_of(layout)]
    text.write_text("".join(parts), encoding="utf-8")
    return [html, text]
