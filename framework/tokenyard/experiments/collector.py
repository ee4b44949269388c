"""Collector: watches an engine run a workload, and keeps what came of each request."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.experiments.columns import Column, GapCounter, Names, RareColumn
from tokenyard.experiments.records import RequestStatus, RequestTable
from tokenyard.interfaces.observer import Observer
from tokenyard.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import LongArray
    from tokenyard.engine_outputs import EngineCoreOutputs, FinishedRequest
    from tokenyard.experiments.arrivals import Arrived
    from tokenyard.scheduler_output import RequestStart, SchedulerOutput

_NOBODY = -1
_STATUS = {
    FinishReason.STOP: RequestStatus.FINISHED,
    FinishReason.LENGTH: RequestStatus.FINISHED,
    FinishReason.ABORT: RequestStatus.ABORTED,
    FinishReason.ERROR: RequestStatus.REJECTED,
}


class Collector(Observer):
    """Requests are known by their numbers, which their ids spell.

    What changes every step lives in arrays by slot of the engine's batch, and moves to the request's row when that
    leaves its slot: a step that only decodes costs a handful of vector operations.
    """

    def __init__(self, capacity: int) -> None:
        self._num_requests = 0
        self._clients, self._sessions = Names(), Names()
        self.gaps = GapCounter()
        self._arrival, self._first_scheduled = Column(np.float64), Column(np.float64)
        self._first_token, self._finish = Column(np.float64), Column(np.float64)
        self._prompt, self._output, self._computed = Column(np.int32), Column(np.int32), Column(np.int32)
        self._status = Column(np.int8)
        self._client, self._session = RareColumn(np.int32, -1), RareColumn(np.int32, -1)
        self._deadline, self._priority = RareColumn(np.float64, np.nan), RareColumn(np.int64, 0)
        self._cached, self._preemptions = RareColumn(np.int32, 0), RareColumn(np.int32, 0)
        # By slot; C = capacity
        self._rows: LongArray = np.full(capacity, _NOBODY, dtype=np.int64)  # [C] whose slot it is
        self._scheduled: LongArray = np.zeros(capacity, dtype=np.int64)  # [C] tokens computed in this stay
        self._tokens: LongArray = np.zeros(capacity, dtype=np.int64)  # [C] tokens got so far, in all stays
        self._last_token = np.zeros(capacity)  # [C] when the last of them came; no meaning without one
        self._slots: dict[int, int] = {}  # by row: of those that hold a slot
        # By row, of those that wait again: how many tokens, and when the last one came.
        self._last: dict[int, tuple[int, float]] = {}
        self._last_step_end = -np.inf
        # The same rows decode together for many steps: what these add waits until somebody asks.
        self._steady_slots: LongArray | None = None  # of the last step, when all its rows got a token for a token
        self._num_steady = 0  # such steps that are not added yet

    def arrived(self, arrived: Arrived) -> None:
        """A request is sent; its numbers come one after another."""
        row, request = arrived.number, arrived.request
        if row != self._num_requests:
            raise RuntimeError(f"request {row} came when {self._num_requests} was to come")
        self._num_requests = row + 1
        for column in self._columns():
            column.reserve(row + 1)
        self._client.put(row, self._clients.number(request.client))
        self._session.put(row, self._sessions.number(request.session))
        self._arrival.data[row] = arrived.arrival
        self._first_scheduled.data[row] = self._first_token.data[row] = self._finish.data[row] = np.nan
        if request.deadline is not None:
            self._deadline.put(row, arrived.arrival + request.deadline)
        self._priority.put(row, request.priority)
        self._prompt.data[row] = request.num_prompt_tokens
        self._output.data[row] = self._computed.data[row] = 0
        self._status.data[row] = RequestStatus.UNFINISHED

    # Observer

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        num_rows = len(output.slots)
        is_steady = num_rows == result.num_scheduled_tokens == len(result.request_ids)
        if is_steady and output.slots is self._steady_slots:
            self._num_steady += 1
            self.gaps.add(now - self._last_step_end, num_rows)
        else:
            self._add_steady()
            self._take_step(output, result, now)
            self._steady_slots = output.slots if is_steady else None
        self._last_step_end = now

    def _take_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        begin = max(output.scheduled_at, self._last_step_end)  # under overlap it was scheduled while another ran
        for start in output.new:
            row = self._enter(start)
            self._first_scheduled.data[row] = begin
            self._cached.put(row, start.num_computed_tokens)
        for start in output.resumed:
            self._enter(start)
        self._scheduled[output.slots] += output.num_scheduled_tokens
        self._take_tokens(output, result, now)

    def ended(self, ends: Sequence[FinishedRequest], now: float) -> None:
        """Ends that came with a step, of which it has been told, or without one."""
        self._add_steady()
        for end in ends:
            self._end(end, now)

    # What has been seen

    def table(self) -> RequestTable:
        """All requests; the collector is of no use after that."""
        self._add_steady()
        for slot in list(self._slots.values()):
            self._leave(slot)
        for row, (num_tokens, _) in self._last.items():
            self._output.data[row] = num_tokens
        count = self._num_requests
        prompt, output, cached = self._prompt.data[:count], self._output.data[:count], self._cached.values(count)
        # The last token is never computed; whoever got none has computed at most its prompt.
        recomputed = self._computed.data[:count]
        recomputed -= prompt
        recomputed -= np.maximum(output - 1, 0)
        recomputed += cached
        np.maximum(recomputed, 0, out=recomputed)
        return RequestTable(
            id=np.arange(count, dtype=np.int64),
            client=self._client.values(count),
            clients=self._clients.names,
            session=self._session.values(count),
            sessions=self._sessions.names,
            arrival=self._arrival.data[:count],
            first_scheduled=self._first_scheduled.data[:count],
            first_token=self._first_token.data[:count],
            finish=self._finish.data[:count],
            prompt=prompt,
            output=output,
            cached=cached,
            preemptions=self._preemptions.values(count),
            recomputed=recomputed,
            priority=self._priority.values(count),
            deadline=self._deadline.values(count),
            status=self._status.data[:count],
        )

    # Helpers

    def _add_steady(self) -> None:
        """What steps of the same rows have added since the last call."""
        if self._num_steady and self._steady_slots is not None:
            self._scheduled[self._steady_slots] += self._num_steady
            self._tokens[self._steady_slots] += self._num_steady
            self._last_token[self._steady_slots] = self._last_step_end
        self._steady_slots, self._num_steady = None, 0

    def _columns(self) -> tuple[Column[np.int32] | Column[np.float64] | Column[np.int8], ...]:
        return (
            *(self._arrival, self._first_scheduled, self._first_token, self._finish),
            *(self._prompt, self._output, self._computed, self._status),
        )

    def _enter(self, start: RequestStart) -> int:
        row, slot = int(start.request_id), start.slot.index
        if slot >= len(self._rows):
            self._grow(slot + 1)
        if row in self._slots:  # it was preempted since its last step
            self._leave(self._slots[row])
        if self._rows[slot] != _NOBODY:
            self._leave(slot)
        self._rows[slot], self._slots[row] = row, slot
        self._scheduled[slot] = 0
        self._tokens[slot], self._last_token[slot] = self._last.pop(row, (0, np.nan))
        return row

    def _leave(self, slot: int) -> None:
        """What a slot knows moves to its request."""
        row = int(self._rows[slot])
        self._rows[slot] = _NOBODY
        del self._slots[row]
        self._computed.data[row] += self._scheduled[slot]
        self._last[row] = int(self._tokens[slot]), float(self._last_token[slot])

    def _take_tokens(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        """A token each, as an engine without drafts gives them."""
        slots = output.slots[output.samples]
        if len(slots) != len(result.request_ids):  # some have ended since, or wait again
            named = [self._slots[row] for row in map(int, result.request_ids) if row in self._slots]
            slots = np.array(named, dtype=np.int64)
        self._tokens[slots] += 1
        last = self._last_token[slots]
        self._last_token[slots] = now
        is_steady = last == self._last_step_end
        num_steady = int(np.count_nonzero(is_steady))
        if num_steady:
            self.gaps.add(now - self._last_step_end, num_steady)
        if num_steady < len(slots):
            others = last[~is_steady]
            is_first = np.isnan(others)
            self._first_token.data[self._rows[slots[~is_steady][is_first]]] = now
            self.gaps.extend((now - others[~is_first]).tolist())

    def _end(self, end: FinishedRequest, now: float) -> None:
        row = int(end.request_id)
        if row in self._slots:
            self._leave(self._slots[row])
        num_tokens, _ = self._last.pop(row, (0, np.nan))
        self._output.data[row] = num_tokens
        self._finish.data[row] = now
        self._preemptions.put(row, end.num_preemptions)
        self._status.data[row] = _STATUS[end.reason]

    def _grow(self, length: int) -> None:
        more = max(length, 2 * len(self._rows)) - len(self._rows)
        self._rows = np.concatenate((self._rows, np.full(more, _NOBODY)))
        self._scheduled = np.concatenate((self._scheduled, np.zeros(more, np.int64)))
        self._tokens = np.concatenate((self._tokens, np.zeros(more, np.int64)))
        self._last_token = np.concatenate((self._last_token, np.zeros(more)))
