"""`tokenyard run-batch FILE.jsonl -o FILE.jsonl [MODEL]`: OpenAI's batch format, without a server or with one."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from tokenyard.cli.arguments import Parser, make_parser, parse, tell_progress
from tokenyard.cli.terminal import progress_bar, say
from tokenyard.errors import UserError
from tokenyard.launch.flags import Flagged

if TYPE_CHECKING:
    from tokenyard.cli.arguments import Given
    from tokenyard.client.batch import Ask, BatchCounts

_SUFFIX = ".jsonl"
_USAGE = f"FILE{_SUFFIX} -o FILE{_SUFFIX}"
_REMOTE_CONCURRENCY = 64
_MAX_CONCURRENCY = 65_536
_MAX_REMOTE_BODY = 8 * 2**20  # bytes: a server may take less


@dataclass(frozen=True, slots=True)
class _Job:
    source: Path
    target: Path
    max_concurrency: int | None
    is_overwriting: bool


def command_parser() -> Parser:
    """The command's own flags."""
    parser = make_parser(
        "run-batch",
        f"{_USAGE} [MODEL] [flags] [overrides]",
        "Answer a file of requests in OpenAI's batch format: custom_id, method, url (/v1/chat/completions or "
        "/v1/completions) and body in each line. Rows come in the order of the lines; a line that is wrong gets a row "
        "that says so.",
        model_at=1,
    )
    parser.add_argument("-i", "--input-file", metavar="FILE", help="the requests, instead of the first word")
    parser.add_argument("-o", "--output-file", metavar="FILE", help="the answers, a .jsonl file that is not there yet")
    parser.add_argument("--overwrite", action="store_true", help="replace that file")
    parser.add_argument("--url", metavar="URL", help="ask a server of OpenAI's API; no model is loaded here")
    parser.add_argument("--insecure", action="store_true", help="with --url: take any TLS certificate")
    parser.add_argument(
        "--max-concurrency", type=int, metavar="N", help="requests at once; default: twice max_num_seqs, 64 with --url"
    )
    parser.add_argument("--json", action="store_true", help="print the counts as one line of JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Rows go to the output file, counts to stdout or stderr. 1 when a request has failed: its row says why."""
    parser = command_parser()
    if any(word.startswith(("-i", "--input-file")) for word in arguments):
        parser.model_at = 0
    given = parse(parser, arguments)
    job = _job(given)
    counts = _answer_offline(given, job) if given.flags.url is None else _ask_server(given, job)
    if given.flags.json:
        print(json.dumps({"output_file": str(job.target), **asdict(counts)}))
    else:
        say(f"{job.target}: {counts.completed} answered, {counts.failed} failed")
    return 1 if counts.failed else 0


def _answer_offline(given: Given, job: _Job) -> BatchCounts:
    """An engine in this process, over the routes of a server."""
    config, catalogue = given.load()
    from tokenyard.server.run import check_packages

    check_packages()
    tell_progress("tokenyard.front_end")
    from tokenyard.server.offline import OfflineServer  # torch is imported only once everything given has been checked

    server = OfflineServer(config, catalogue)
    max_concurrency = job.max_concurrency or 2 * config.scheduler.max_num_seqs

    async def run() -> BatchCounts:
        async with server:
            return await _run(job, server.answer, max_concurrency, config.server.max_body_bytes)

    return asyncio.run(run())


def _ask_server(given: Given, job: _Job) -> BatchCounts:
    _refuse_engine_settings(given)
    from tokenyard.client.connection import Answer, Connection
    from tokenyard.client.endpoint import find_endpoint
    from tokenyard.client.models import list_models

    endpoint = find_endpoint(given.flags.url, "--url")

    async def run() -> BatchCounts:
        async with Connection(endpoint, is_verified=not given.flags.insecure) as connection:
            await list_models(connection)  # a server that is not there, or a key that is wrong, is told once

            async def ask(route: str, body: bytes) -> Answer:
                return await connection.request("POST", route, body)

            return await _run(job, ask, job.max_concurrency or _REMOTE_CONCURRENCY, _MAX_REMOTE_BODY)

    return asyncio.run(run())


async def _run(job: _Job, ask: Ask, max_concurrency: int, max_body_bytes: int) -> BatchCounts:
    from tokenyard.client.batch import run_batch
    from tokenyard.client.batch_file import BatchReader

    with (
        job.source.open("rb") as source,
        job.target.open("wb" if job.is_overwriting else "xb", buffering=0) as target,
        progress_bar(None, "requests") as on_row,
    ):
        reader = BatchReader(source, max_body_bytes)
        return await run_batch(reader, ask, _line_writer(target), max_concurrency, on_row)


def _line_writer(file: BinaryIO) -> Callable[[bytes], None]:
    """Writes whole lines: of one that the disk cannot hold nothing is left."""

    def write(line: bytes) -> None:
        begin, rest = file.tell(), memoryview(line)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError:
            file.truncate(begin)
            raise

    return write


def _job(given: Given) -> _Job:
    """The files and numbers, checked before anything is loaded."""
    flags = given.flags
    named = given.words[0] if given.words else flags.input_file
    source, target = _path(named, "--input-file"), _path(flags.output_file, "--output-file")
    if flags.insecure and flags.url is None:
        raise UserError("--insecure is for the TLS certificate of a server; give --url too, or remove it")
    if not source.is_file():
        raise UserError(f"--input-file: there is no file {source}")
    if not os.access(source, os.R_OK):
        raise UserError(f"--input-file: {source} may not be read")
    if not target.parent.is_dir():
        raise UserError(f"--output-file: there is no folder {target.parent}; make it first")
    if target.exists() and target.samefile(source):
        raise UserError("--output-file is the input file; give another name")
    if target.exists() and not flags.overwrite:
        raise UserError(f"--output-file: {target} exists; give another name, or --overwrite to replace it")
    if target.is_dir() or not os.access(target if target.exists() else target.parent, os.W_OK):
        raise UserError(f"--output-file: {target} cannot be written")
    most = flags.max_concurrency
    if most is not None and not 1 <= most <= _MAX_CONCURRENCY:
        raise UserError(f"--max-concurrency takes 1 to {_MAX_CONCURRENCY} requests, got {most}")
    return _Job(source, target, most, flags.overwrite)


def _path(text: str | None, flag: str) -> Path:
    if not text:
        raise UserError(f"{flag} is missing: tokenyard run-batch {_USAGE}")
    if "://" in text:
        raise UserError(f"{flag} takes a file of this machine, and {text[:200]!r} is a URL; nothing is fetched")
    if not text.endswith(_SUFFIX):
        raise UserError(f"{flag} takes a {_SUFFIX} file, got {text[:200]!r}")
    return Path(text)


def _refuse_engine_settings(given: Given) -> None:
    for override in given.overrides:
        text = override.flag if isinstance(override, Flagged) else override
        reason = "each line names its model" if text in ("MODEL", "--model") else "the server has an engine of its own"
        raise UserError(f"{text} has no effect with --url: {reason}; remove it")
    if given.config_file is not None:
        raise UserError("--config has no effect with --url: the server has an engine of its own; remove it")
