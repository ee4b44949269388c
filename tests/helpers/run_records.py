"""Records of runs, written down row by row, and drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from hypothesis import strategies as st
from tokenyard.experiments.records import (
    RequestStatus,
    RequestTable,
    RunRecord,
    RunTotals,
    StepTable,
    TokenGaps,
)

NAN = float("nan")
UNKNOWN_TOTALS = RunTotals(
    num_steps=None,
    num_computed_tokens=None,
    num_preemptions=None,
    busy_seconds=None,
    mean_kv_usage=None,
    max_kv_usage=None,
    mean_batch_size=None,
    mean_budget_usage=None,
    scheduler_seconds=None,
)
"""Of a server that somebody else runs."""

TOTALS = RunTotals(
    num_steps=100,
    num_computed_tokens=1000,
    num_preemptions=3,
    busy_seconds=1.0,
    mean_kv_usage=0.25,
    max_kv_usage=0.5,
    mean_batch_size=4.0,
    mean_budget_usage=0.75,
    scheduler_seconds=None,
)
NO_GAPS = TokenGaps(seconds=np.empty(0), counts=np.empty(0, dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A request of a table. NaN = never."""

    arrival: float
    scheduled: float = NAN
    first: float = NAN
    finish: float = NAN
    prompt: int = 1
    output: int = 0
    client: str | None = None
    priority: int = 0
    deadline: float = NAN
    cached: int = 0
    preemptions: int = 0
    recomputed: int = 0
    status: RequestStatus = RequestStatus.FINISHED


def table(rows: Sequence[Row]) -> RequestTable:
    clients = tuple(dict.fromkeys(row.client for row in rows if row.client is not None))
    return RequestTable(
        id=np.arange(len(rows)),
        client=_ints([-1 if row.client is None else clients.index(row.client) for row in rows]),
        clients=clients,
        session=np.full(len(rows), -1, dtype=np.int32),
        sessions=(),
        arrival=_floats([row.arrival for row in rows]),
        first_scheduled=_floats([row.scheduled for row in rows]),
        first_token=_floats([row.first for row in rows]),
        finish=_floats([row.finish for row in rows]),
        prompt=_ints([row.prompt for row in rows]),
        output=_ints([row.output for row in rows]),
        cached=_ints([row.cached for row in rows]),
        preemptions=_ints([row.preemptions for row in rows]),
        recomputed=_ints([row.recomputed for row in rows]),
        priority=np.array([row.priority for row in rows], dtype=np.int64),
        deadline=_floats([row.deadline for row in rows]),
        status=np.array([row.status for row in rows], dtype=np.int8),
    )


def record(
    rows: Sequence[Row], *, gaps: TokenGaps = NO_GAPS, totals: RunTotals = TOTALS, steps: StepTable | None = None
) -> RunRecord:
    return RunRecord(requests=table(rows), gaps=gaps, totals=totals, steps=steps)


@st.composite
def some_rows(draw: st.DrawFn, *, max_size: int = 12, clients: Sequence[str | None] = (None, "a", "b")) -> list[Row]:
    """In order of arrival, with every kind of end. Times are multiples of 1/4, so that many are equal."""
    arrivals = sorted(draw(st.lists(st.integers(0, 24), max_size=max_size)))
    return [draw(_row(arrival / 4, clients)) for arrival in arrivals]


@st.composite
def _row(draw: st.DrawFn, arrival: float, clients: Sequence[str | None]) -> Row:
    spans = st.integers(0, 16).map(lambda quarters: quarters / 4)
    prompt, output = draw(st.integers(1, 100)), draw(st.integers(1, 40))
    scheduled = arrival + draw(spans)
    first = scheduled + draw(spans) + 0.25
    finish = first + (draw(spans) if output > 1 else 0.0)
    row = Row(
        arrival=arrival,
        scheduled=scheduled,
        first=first,
        finish=finish,
        prompt=prompt,
        output=output,
        client=draw(st.sampled_from(clients)),
        priority=draw(st.integers(-1, 1)),
        deadline=draw(st.sampled_from([NAN, arrival + 2.0])),
        cached=draw(st.integers(0, prompt - 1)),
        preemptions=draw(st.integers(0, 2)),
        recomputed=draw(st.integers(0, 5)),
    )
    return replace(row, **draw(st.sampled_from(_ends(row))))


def _ends(row: Row) -> list[dict[str, object]]:
    """What makes it one of each kind."""
    never_ran = {"scheduled": NAN, "first": NAN, "output": 0, "cached": 0, "preemptions": 0, "recomputed": 0}
    return [
        {},
        {},
        {"status": RequestStatus.ABORTED},
        {"status": RequestStatus.UNFINISHED, "finish": NAN},
        {"status": RequestStatus.UNFINISHED, "finish": NAN, "first": NAN, "output": 0},
        {**never_ran, "status": RequestStatus.REJECTED, "finish": row.arrival},
        {**never_ran, "status": RequestStatus.ABORTED},
        {**never_ran, "status": RequestStatus.UNFINISHED, "finish": NAN},
    ]


def _floats(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array(values, dtype=np.float64)


def _ints(values: Sequence[int]) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)
