"""TraceWorkload: a trace file as a workload."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tokenyard.errors import ConfigError
from tokenyard.experiments.traces.formats import READERS, SERVEGEN, checked_format, find_format
from tokenyard.experiments.traces.reader import LeftOut, ReadOptions
from tokenyard.experiments.traces.servegen import merged
from tokenyard.experiments.traces.servegen_files import read_clients
from tokenyard.experiments.traces.sources import Source, find_source
from tokenyard.experiments.traces.windows import select
from tokenyard.interfaces.workload import Workload, WorkloadContext, WorkloadRequest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Drawn:
    """What of the trace comes, and where it is from."""

    requests: Callable[[], Iterator[WorkloadRequest]]
    description: str
    left_out: Callable[[], LeftOut]
    has_content: bool


class TraceWorkload(Workload):
    """The requests that `seed` and `limit` select of a trace; `description` says which, and under which licence."""

    def __init__(self, path: Path, source: Source | None, drawn: _Drawn) -> None:
        self._name = path.name
        self._origin = path.name if source is None else source.attribution
        self._drawn = drawn

    def requests(self) -> Iterator[WorkloadRequest]:
        try:
            yield from self._drawn.requests()
        finally:
            if left_out := str(self._drawn.left_out()):
                logger.warning("%s: rows left out: %s", self._name, left_out)

    @property
    def has_content(self) -> bool:
        return self._drawn.has_content

    @property
    def description(self) -> str:
        left_out = str(self._drawn.left_out())
        return f"{self._origin}; {self._drawn.description}{f'; left out {left_out}' if left_out else ''}"


def open_trace(
    path: str, *, format_name: str | None, options: ReadOptions, rate_scale: float | None, context: WorkloadContext
) -> TraceWorkload:
    """`path` is a file, a folder, `packaged:NAME` or `fetched:NAME`. Raises ConfigError, of its first rows already."""
    place, source = find_source(path)
    if not place.exists():
        raise ConfigError(f"workload.path={path}: no such file; give a trace's path, packaged:NAME or fetched:NAME")
    if not (place.is_file() or place.is_dir()):
        raise ConfigError(f"workload.path={path}: not a file; a trace is read more than once, so write it to one first")
    given = format_name or (source.format_name if source else None)
    name = find_format(place) if given is None else checked_format(given)
    if name == SERVEGEN:
        return TraceWorkload(place, source, _servegen(place, options, rate_scale, context))
    if rate_scale is not None:
        raise ConfigError(
            f"workload.rate_scale={rate_scale:g}: format {name} has arrival times; scale them with workload.time_scale"
        )
    if place.is_dir():
        raise ConfigError(f"workload.path={path}: a folder; only format servegen is one, and format {name} is a file")
    return TraceWorkload(place, source, _rows(place, name, options, context))


def _rows(path: Path, name: str, options: ReadOptions, context: WorkloadContext) -> _Drawn:
    reader = READERS[name](path, options)
    next(reader.rows())  # a file that is none of this format is told at launch
    selection = select(reader.rows, seed=context.seed, limit=context.limit)
    return _Drawn(
        requests=selection.requests,
        description=selection.description,
        left_out=lambda: reader.left_out,
        has_content=reader.has_content,
    )


def _servegen(path: Path, options: ReadOptions, rate_scale: float | None, context: WorkloadContext) -> _Drawn:
    clients = read_clients(path)
    if not any(window.rate for client in clients for window in client.rates):
        raise ConfigError(f"{path}: all rates are 0; a trace has at least one request")
    left_out = LeftOut()
    scale = 1.0 if rate_scale is None else rate_scale
    what = f"drawn with seed {context.seed} from {len(clients)} clients at {scale:g} times their rates"
    return _Drawn(
        requests=lambda: merged(
            clients,
            seed=context.seed,
            rate_scale=scale,
            most_tokens=options.max_request_tokens,
            left_out=left_out,
        ),
        description=what,
        left_out=lambda: left_out,
        has_content=False,
    )
