"""`tokenyard report DIR`: tables, pictures and a page from the runs below a folder."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.cli.arguments import Parser, make_parser, parse
from tokenyard.cli.terminal import progress_bar, say
from tokenyard.errors import UserError

if TYPE_CHECKING:
    from tokenyard.experiments.report.write import Report


def command_parser() -> Parser:
    """The command's own flags."""
    parser = make_parser(
        "report",
        "DIR [--to FOLDER] [--baseline SETTING] [--mix-loops] [--no-pictures] [--json]",
        "Write tables (Markdown, CSV, Parquet), pictures (PNG, SVG) and an HTML page from all finished runs below DIR. "
        "Settings are compared with the first one, seed by seed.",
    )
    parser.add_argument("--to", metavar="FOLDER", help="where the report goes; default: DIR/report")
    parser.add_argument("--baseline", metavar="SETTING", help="what the others are compared with, such as fcfs")
    parser.add_argument("--mix-loops", action="store_true", help="compare runs of different engine loops")
    parser.add_argument("--no-pictures", action="store_true", help="tables alone")
    parser.add_argument("--json", action="store_true", help="print one line of JSON: where everything is, comparisons")
    return parser


def main(arguments: Sequence[str]) -> int:
    """What was compared goes to stdout, notes to stderr."""
    given = parse(command_parser(), arguments)
    if given.overrides or given.config_file is not None:
        raise UserError("report takes no config: it reads what runs were made with from their folders")
    if len(given.words) != 1 or not given.words[0]:
        got = "''" if given.words == [""] else len(given.words)
        raise UserError(f"report takes one folder, got {got}: tokenyard report DIR")
    from tokenyard.experiments.report.write import write_report

    flags = given.flags
    with progress_bar(None, "runs", shown=not flags.json) as on_run:
        report = write_report(
            Path(given.words[0]),
            to=None if flags.to is None else Path(flags.to),
            baseline=flags.baseline,
            mixes_loops=flags.mix_loops,
            has_pictures=not flags.no_pictures,
            on_run=on_run,
        )
    for note in report.notes:
        say(f"note: {note}")
    print(json.dumps(_values(report)) if flags.json else _text(report))
    return 0


def _values(report: Report) -> dict[str, object]:
    layout = report.layout
    table = report.table("comparison")
    rows = [] if table is None else [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    return {
        "folder": str(report.folder),
        "page": str(report.folder / "report.html"),
        "files": [str(path) for path in report.files],
        "pictures": list(report.pictures),
        "runs": sum(len(runs) for runs in layout.cells.values()),
        "axes": list(layout.axes),
        "settings": [layout.setting_label(setting) for setting in layout.settings],
        "conditions": [layout.condition_label(condition) for condition in layout.conditions],
        "comparison": rows,
        "notes": list(report.notes),
    }


def _text(report: Report) -> str:
    """The comparison, or the means where there is none, and where the page is."""
    from tokenyard.experiments.report.tables import aligned, headlines

    table = report.table("comparison")
    shown = headlines(table) if table is not None else report.table("settings")
    text = "" if shown is None else f"{shown.title}\n{aligned(shown)}\n\n"
    return f"{text}{report.folder / 'report.html'}"
