"""RunningColumns: what runs, in arrays, for policies."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.scheduler.stays import Stays

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenyard.arrays import BoolArray, FloatArray, IntArray, LongArray
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.running import RunningBatch
    from tokenyard.scheduler.slots import SlotTable


class RequestFacts:
    """[slots] what never changes of a request, looked up once a stay."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._stays = Stays()
        self.arrival_time = np.zeros(0, dtype=np.float64)
        self.num_prompt_tokens = np.zeros(0, dtype=np.int64)
        self.priority = np.zeros(0, dtype=np.int64)

    def of(self, slots: LongArray) -> RequestFacts:
        """Itself, with the requests in these slots, which are held."""
        rows = self._stays.look(slots, self._table.generation[slots])
        if (missing := len(self._stays) - len(self.priority)) > 0:
            self.arrival_time = np.pad(self.arrival_time, (0, missing))
            self.num_prompt_tokens = np.pad(self.num_prompt_tokens, (0, missing))
            self.priority = np.pad(self.priority, (0, missing))
        for slot in slots[rows].tolist():
            if (request := self._table.requests[slot]) is not None:
                self.arrival_time[slot] = request.arrival_time
                self.num_prompt_tokens[slot] = request.num_prompt_tokens
                self.priority[slot] = request.priority
        return self


class RunningColumns:
    """Satisfies `tokenyard.interfaces.RequestColumns`, of the requests that run or are paused, in admission order.

    Right until something happens in the scheduler.
    """

    def __init__(self, table: SlotTable, running: RunningBatch, facts: RequestFacts) -> None:
        self._table = table
        self._slots = running.slots()
        self._paused: Mapping[str, Request] = running.paused
        self._all_facts = facts

    @cached_property
    def _facts(self) -> RequestFacts:
        return self._all_facts.of(self._slots)

    @cached_property
    def arrival_time(self) -> FloatArray:
        return self._facts.arrival_time[self._slots]

    @cached_property
    def priority(self) -> LongArray:
        return self._facts.priority[self._slots]

    @cached_property
    def num_prompt_tokens(self) -> LongArray:
        return self._facts.num_prompt_tokens[self._slots]

    @cached_property
    def num_output_tokens(self) -> LongArray:
        return self._table.num_tokens[self._slots] - self.num_prompt_tokens

    @cached_property
    def num_computed_tokens(self) -> IntArray:
        return self._table.num_computed[self._slots] - self._table.tokens_in_flight[self._slots]

    @cached_property
    def attained_service(self) -> LongArray:
        return self._table.service_before[self._slots] + self.num_computed_tokens

    @cached_property
    def is_paused(self) -> BoolArray:
        paused = np.zeros(self._table.capacity, dtype=np.bool_)
        paused[[request.slot for request in self._paused.values() if request.slot is not None]] = True
        return paused[self._slots]
