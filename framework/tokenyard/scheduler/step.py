"""StepBuilder: collects one step's decisions and turns them into a SchedulerOutput."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.scheduler.request_state import RequestStatus
from tokenyard.scheduler_output import BlockTableUpdate, RequestStart, SchedulerOutput, Slot

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.interfaces.kv_cache import Allocation
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.slots import SlotTable


class StepBuilder:
    """What is added between two calls of `finish` makes one step; ended slots wait here until there is a step."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._num_steps = 0
        self._ended: list[Slot] = []
        self._clear()

    def add_running(self, slots: IntArray, counts: IntArray) -> None:
        """Rows that are in the batch already, with the number of tokens each gets."""
        self._slots.append(slots)
        self._counts.append(counts)

    def add_start(
        self,
        request: Request,
        slot: Slot,
        status: RequestStatus,
        num_cached_tokens: int,
        allocation: Allocation,
    ) -> None:
        """A request that enters the batch; its row is added by `add_running` besides."""
        table = self._table
        table.num_computed[slot.index] = num_cached_tokens
        table.num_committed[slot.index] = num_cached_tokens
        table.valid_until[slot.index] = allocation.valid_until_tokens
        starts = self._resumed if status is RequestStatus.PREEMPTED else self._new
        starts.append(
            RequestStart(
                request_id=request.request_id,
                slot=slot,
                token_ids=request.token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_cached_tokens,
                block_ids=allocation.new_block_ids,
                params=request.core.params,
                lora_name=request.core.lora_name,
            )
        )

    def add_blocks(self, slot: int, start: int, allocation: Allocation) -> None:
        """The table of a running request grew from block `start` on."""
        named = Slot(slot, int(self._table.generation[slot]))
        self._updates.extend(
            BlockTableUpdate(named, group, start, block_ids) for group, block_ids in enumerate(allocation.new_block_ids)
        )

    def add_ended(self, slot: int) -> None:
        """The request of this slot left the batch."""
        self._ended.append(Slot(slot, int(self._table.generation[slot])))

    def finish(self, now: float) -> SchedulerOutput | None:
        """The step, counted as in flight from now on; None when no row was added."""
        slots, counts = np.concatenate(self._slots), np.concatenate(self._counts)
        if not len(slots):
            return None
        table = self._table
        before = table.num_computed[slots]
        output = SchedulerOutput(
            step=self._num_steps,
            scheduled_at=now,
            new=tuple(self._new),
            resumed=tuple(self._resumed),
            slots=slots,
            generations=table.generation[slots],
            num_computed_tokens=before,
            num_scheduled_tokens=counts,
            samples=before + counts == table.num_tokens[slots],
            block_table_updates=tuple(self._updates),
            finished=tuple(self._ended),
        )
        table.num_computed[slots] += counts
        table.num_in_flight[slots] += counts
        table.steps_in_flight[slots] += 1
        self._num_steps += 1
        self._ended.clear()
        self._clear()
        return output

    @property
    def num_steps(self) -> int:
        return self._num_steps

    def _clear(self) -> None:
        empty = np.empty(0, dtype=np.int32)
        self._slots: list[IntArray] = [empty]
        self._counts: list[IntArray] = [empty]
        self._new: list[RequestStart] = []
        self._resumed: list[RequestStart] = []
        self._updates: list[BlockTableUpdate] = []
