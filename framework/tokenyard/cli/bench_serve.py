"""`tokenyard bench serve`: measures a server that runs, and prints a table or a line of JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.bench.serve_report import failures, report_text, warnings
from tokenyard.bench.serve_settings import ServeBench
from tokenyard.bench.settings import read_settings
from tokenyard.cli.terminal import progress_bar, say
from tokenyard.client.connection import check_installed
from tokenyard.errors import TokenyardError, UserError

if TYPE_CHECKING:
    import argparse

    from tokenyard.bench.serve import ServeRun
    from tokenyard.cli.arguments import Given, Parser


def add_result_flags(parser: Parser) -> None:
    """Where the result goes besides stdout, as vLLM has it."""
    parser.add_argument("--save-result", action="store_true", help="write the JSON to a file")
    parser.add_argument("--save-detailed", action="store_true", help="the same, with lists of every request's figures")
    parser.add_argument("--result-dir", metavar="FOLDER", default=".", help="of that file")
    parser.add_argument("--result-filename", metavar="FILE", help="of that file; default: by backend, rate and time")
    parser.add_argument("--disable-tqdm", action="store_true", help="no progress bar")


def serve_kind(given: Given) -> None:
    """The kind `serve`: see tokenyard.bench.serve. Raises TokenyardError, behind its output, when requests failed."""
    settings = read_settings(ServeBench, given.own_overrides)
    check_installed()
    path = _result_path(given.flags, settings)
    from tokenyard.bench.serve import run_serve_bench  # imports what talks to servers

    with progress_bar(settings.num_prompts, "requests", shown=not given.flags.disable_tqdm) as on_end:
        run = asyncio.run(run_serve_bench(settings, say, on_end))
    if path is not None:
        _save(run, path, is_detailed=given.flags.save_detailed)
    print(json.dumps(run.row) if given.flags.json else report_text(run.row, settings.shown, settings.percentiles))
    for text in warnings(run.row):
        say(f"WARNING: {text}")
    if failed := failures(run.row):
        raise TokenyardError(failed)


def _result_path(flags: argparse.Namespace, settings: ServeBench) -> Path | None:
    """Where the result goes; refused before anything is measured."""
    if not (flags.save_result or flags.save_detailed):
        if flags.result_filename is not None:
            raise UserError("--result-filename needs --save-result")
        return None
    moment = time.strftime("%Y%m%d-%H%M%S")
    path = Path(flags.result_dir) / (flags.result_filename or f"{settings.backend}-{settings.rate}qps-{moment}.json")
    if not path.parent.is_dir():
        raise UserError(f"--result-dir: there is no folder {path.parent}; make it first")
    if path.is_dir():
        raise UserError(f"--result-filename: {path} is a folder; give a file")
    return path


def _save(run: ServeRun, path: Path, *, is_detailed: bool) -> None:
    from tokenyard.bench.serve import details

    more: Mapping[str, object] = details(run.records) if is_detailed else {}
    moment = time.strftime("%Y-%m-%dT%H:%M:%S%z")
    path.write_text(json.dumps({"date": moment, **run.row, **more}) + "\n", encoding="utf-8")
    say(f"written: {path}")
