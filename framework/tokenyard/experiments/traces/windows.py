"""Which requests of a trace a seed selects: the trace itself, a window of it, or a resample."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from tokenyard.errors import ConfigError
from tokenyard.interfaces.workload import Segment, WorkloadRequest

Rows: TypeAlias = Callable[[], Iterator[WorkloadRequest]]
"""Reads a trace from its beginning, each time it is called."""

_MOST_BLOCK_ROWS = 100
_FEWEST_BLOCKS = 32  # drawn from as many at least: more than 10**17 outcomes, so no two seeds meet
_STREAM = 0x7472616365  # what sets these draws apart from others of the same seed
_STRIDE = 0x9E3779B97F4A7C15  # odd, so that shifted contents stay different from each other
_CONTENTS = 2**63


@dataclass(frozen=True, slots=True)
class Selection:
    """Requests whose times begin at 0, and what they are of the trace, in words."""

    description: str
    requests: Rows


def select(rows: Rows, *, seed: int, limit: int | None) -> Selection:
    """Seed 0 is the trace as it is, its first `limit` rows. Seed k is the k-th window of `limit` rows, counted from 0.

    Beyond the last whole window, and for seeds above 0 without a limit, it is a resample: the trace is cut into blocks
    of consecutive rows, blocks are drawn with replacement, and follow each other in the order of the trace, each row
    with the time since the row before it (a block bootstrap after Carlstein, 1986, which keeps bursts, the joint
    distribution of gaps and lengths, and the trend). Raises ConfigError where too few rows are left to draw from: two
    seeds never give the same requests.
    """
    if seed == 0:
        what = "all rows" if limit is None else f"rows 1 to {limit}, or to the end (window 0 of {limit} rows)"
        return Selection(what, lambda: itertools.islice(rows(), limit))
    wanted = None if limit is None else min((seed + 1) * limit, sys.maxsize)
    num_rows = sum(1 for _ in itertools.islice(rows(), wanted))
    if limit is not None and num_rows == (seed + 1) * limit:
        first = seed * limit
        return Selection(
            f"rows {first + 1} to {first + limit} (window {seed} of {limit} rows)",
            lambda: _from_zero(itertools.islice(rows(), first, first + limit)),
        )
    return _resample(rows, num_rows, seed, limit)


def _resample(rows: Rows, num_rows: int, seed: int, limit: int | None) -> Selection:
    size = num_rows if limit is None else min(limit, num_rows)
    if size < _FEWEST_BLOCKS:
        windows = 1 if limit is None else num_rows // limit
        raise ConfigError(
            f"seed={seed}: the trace has {num_rows} rows, which is {windows} windows, so this seed is a resample, and "
            f"{size} rows are too few for that ({_FEWEST_BLOCKS} at least); take a lower seed or a longer trace"
        )
    block = max(1, min(_MOST_BLOCK_ROWS, size // _FEWEST_BLOCKS))
    random = np.random.default_rng((_STREAM, seed))
    drawn = random.integers(num_rows // block, size=-(-size // block))
    copies = np.bincount(drawn, minlength=num_rows // block)
    description = f"resample {seed}: {size} rows in blocks of {block}, drawn with replacement from {num_rows}"
    return Selection(description, lambda: _drawn(rows(), copies.tolist(), block, size))


def _from_zero(requests: Iterator[WorkloadRequest]) -> Iterator[WorkloadRequest]:
    origin: float | None = None
    for request in requests:
        if origin is None:
            origin = request.arrival
        yield replace(request, arrival=request.arrival - origin)


def _drawn(rows: Iterator[WorkloadRequest], copies: list[int], block: int, size: int) -> Iterator[WorkloadRequest]:
    """`copies[b]` times the rows of block b, until there are `size`; holds one block."""
    now: float | None = None
    left = size
    for copy, gap, request in _copies(rows, copies, block):
        now = 0.0 if now is None else now + gap
        yield _copied(request, copy, now)
        left -= 1
        if not left:
            return


def _copies(
    rows: Iterator[WorkloadRequest], copies: list[int], block: int
) -> Iterator[tuple[int, float, WorkloadRequest]]:
    """Which copy it is, the time since the row before it in the trace, the row.

    Nobody knows the time before the first row; the one after it stands for it.
    """
    last: float | None = None
    for num_copies in copies:
        chunk = list(itertools.islice(rows, block))
        times = [request.arrival for request in chunk]
        gaps = np.diff(times, prepend=2 * times[0] - times[min(1, len(times) - 1)] if last is None else last).tolist()
        last = times[-1]
        for copy in range(num_copies):
            for gap, request in zip(gaps, chunk, strict=True):
                yield copy, gap, request


def _copied(request: WorkloadRequest, copy: int, arrival: float) -> WorkloadRequest:
    """A second copy is another request: a prefix cache must not find the first one's prompt, nor be it one session."""
    if not copy:
        return replace(request, arrival=arrival)
    session = request.session and f"{request.session}#{copy}"
    content = request.content and [
        Segment((content + copy * _STRIDE) % _CONTENTS, tokens) for content, tokens in request.content
    ]
    return replace(request, arrival=arrival, session=session, content=content)
