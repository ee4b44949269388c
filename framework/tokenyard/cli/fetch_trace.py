"""`tokenyard fetch-trace NAME [--to DIR]`, `tokenyard fetch-trace --list`: public traces that do not ship."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenyard.cli.arguments import Parser, make_parser
from tokenyard.cli.terminal import say
from tokenyard.errors import UserError, did_you_mean
from tokenyard.experiments.traces.fetch import FetchedTrace, fetch_trace
from tokenyard.experiments.traces.sources import FETCHABLE, FETCHED_PREFIX, Source, fetched_dir


def command_parser() -> Parser:
    """The command's own flags; it takes none of the engine's."""
    parser = make_parser(
        "fetch-trace",
        "NAME [--to DIR] | --list",
        "Fetch a public trace for workload=trace; its source and licence are printed first.",
    )
    parser.add_argument("--to", metavar="DIR", help="the folder to put it in; default: Tokenyard's cache")
    parser.add_argument("--list", action="store_true", help="list the traces that can be fetched")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Prints where the trace is, and how to use it."""
    flags = command_parser().parse_intermixed_args(list(arguments))
    logging.getLogger().setLevel(flags.log_level.upper())
    if flags.list:
        if flags.words:
            raise UserError(f"unexpected argument '{flags.words[0]}'; --list takes none")
        print("\n".join(_listed(source) for source in FETCHABLE.values()))
        return 0
    source = FETCHABLE[_name(flags.words)]
    if flags.to == "":
        raise UserError("--to is empty; it takes the folder to put the trace in")
    folder = fetched_dir() if flags.to is None else Path(flags.to)
    say(f"{source.attribution}\nsource: {source.url}")
    with _progress(source) as on_bytes:
        fetched = fetch_trace(source, folder, on_bytes)
    print(_told(source, fetched, in_cache=flags.to is None))
    return 0


def _name(words: Sequence[str]) -> str:
    names = ", ".join(FETCHABLE)
    if not words:
        raise UserError(f"say which trace: tokenyard fetch-trace NAME; there is: {names}")
    if len(words) > 1:
        raise UserError(f"unexpected argument '{words[1]}'; fetch-trace takes one name")
    if words[0] not in FETCHABLE:
        raise UserError(f"unknown trace '{words[0]}'{did_you_mean(words[0], FETCHABLE)}; there is: {names}")
    return str(words[0])


def _listed(source: Source) -> str:
    checksum = source.sha256 or "not known to us; the first fetch records it"
    return (
        f"{source.name}\n  {source.title}\n  licence {source.licence}; cite {source.citation}\n"
        f"  {source.url}, at most {source.max_bytes} bytes\n  sha256 {checksum}"
    )


def _told(source: Source, fetched: FetchedTrace, *, in_cache: bool) -> str:
    done = "already there" if fetched.was_there else "fetched"
    check = "as it should be" if fetched.is_verified else "which nobody has told us; recorded beside it"
    path = f"{FETCHED_PREFIX}{source.name}" if in_cache else str(fetched.path)
    return f"{done}: {fetched.path}\nsha256 {fetched.sha256}, {check}\nuse it with workload=trace workload.path={path}"


@contextmanager
def _progress(source: Source) -> Iterator[Callable[[int], None]]:
    """A bar of what has come, only where stderr is a terminal."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda count: None
        return
    from rich.console import Console  # 0.1 s that a run without a bar need not spend
    from rich.progress import DownloadColumn, Progress, SpinnerColumn, TextColumn, TransferSpeedColumn

    columns = (SpinnerColumn(), TextColumn(source.name), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=None)
        yield lambda count: progress.advance(task, count)
