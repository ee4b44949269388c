"""RemoteLog: what a client heard of each request, as a RunRecord."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.client.answer_times import AnswerTimes
from tokenyard.experiments.columns import GapCounter, Names
from tokenyard.experiments.records import RequestStatus, RequestTable, RunRecord, RunTotals

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenyard.experiments.arrivals import Arrived

_MOST_REASONS = 20  # that are told

NOTHING_TOLD = RunTotals(
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
"""A server tells its clients nothing of its steps."""


@dataclass(slots=True)
class Heard(AnswerTimes):
    """One request. Its times are of the workload's clock."""

    arrived: Arrived
    status: RequestStatus = RequestStatus.UNFINISHED

    @property
    def prompt_len(self) -> int:
        """Prompt tokens, by the server's count; where it does not count, those that were meant."""
        return self.arrived.request.num_prompt_tokens if self.usage is None else self.usage.prompt_tokens

    @property
    def num_tokens(self) -> int:
        """Tokens generated, by the server's count; else by the ids that it told, else by its chunks."""
        if self.usage is not None or self.num_told_tokens is None:
            return self.output_len
        return self.num_told_tokens

    @property
    def finish(self) -> float:
        if self.status is RequestStatus.FINISHED:
            return self.token_times[-1]
        return np.nan if self.ended is None else self.ended

    @property
    def deadline(self) -> float | None:
        """On the workload's clock."""
        after = self.arrived.request.deadline
        return None if after is None else self.arrived.arrival + after


class RemoteLog:
    """Requests in order of arrival."""

    def __init__(self) -> None:
        self._all: list[Heard] = []

    def arrived(self, arrived: Arrived) -> Heard:
        heard = Heard(arrived)
        self._all.append(heard)
        return heard

    def reasons(self) -> dict[str, int]:
        """How many requests failed, by reason; the most frequent ones."""
        return dict(Counter(heard.error for heard in self._all if heard.error is not None).most_common(_MOST_REASONS))

    def record(self, facts: Mapping[str, object]) -> RunRecord:
        gaps = GapCounter()
        for heard in self._all:
            gaps.extend(np.diff(heard.token_times).tolist())
        return RunRecord(requests=_table(self._all), gaps=gaps.gaps(), totals=NOTHING_TOLD, facts=facts)


def _table(rows: Sequence[Heard]) -> RequestTable:
    clients, sessions = Names(), Names()
    requests = [heard.arrived.request for heard in rows]
    none = np.zeros(len(rows), dtype=np.int32)
    deadlines = [np.nan if heard.deadline is None else heard.deadline for heard in rows]
    return RequestTable(
        id=np.arange(len(rows), dtype=np.int64),
        client=np.array([clients.number(request.client) for request in requests], dtype=np.int32),
        clients=clients.names,
        session=np.array([sessions.number(request.session) for request in requests], dtype=np.int32),
        sessions=sessions.names,
        arrival=np.array([heard.arrived.arrival for heard in rows], dtype=np.float64),
        first_scheduled=np.full(len(rows), np.nan),
        first_token=np.array([heard.token_times[0] if heard.token_times else np.nan for heard in rows]),
        finish=np.array([heard.finish for heard in rows], dtype=np.float64),
        prompt=np.array([heard.prompt_len for heard in rows], dtype=np.int32),
        output=np.array([heard.num_tokens for heard in rows], dtype=np.int32),
        cached=none,
        preemptions=none,
        recomputed=none,
        priority=np.array([request.priority for request in requests], dtype=np.int64),
        deadline=np.array(deadlines, dtype=np.float64),
        status=np.array([heard.status for heard in rows], dtype=np.int8),
    )
