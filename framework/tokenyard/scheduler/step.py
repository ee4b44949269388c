"""StepBuilder: collects one step's decisions and turns them into a SchedulerOutput."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tokenyard.scheduler_output import BlockTableUpdate, HostTransfer, RequestStart, SchedulerOutput, Slot

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import BoolArray, IntArray, LongArray
    from tokenyard.interfaces.kv_cache import Allocation
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.slots import SlotTable


ArrayT = TypeVar("ArrayT", bound="np.ndarray")

NO_SLOTS: LongArray = np.empty(0, dtype=np.intp)


class StepBuilder:
    """What is added between two calls of `finish` makes one step; ended slots wait here until there is a step."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self.num_steps = 0
        self.num_prefills = 0  # rows of the last step that are no decodes: the last ones
        self._ended: list[Slot] = []
        self._decodes = self._last_slots = NO_SLOTS
        self._generations: IntArray = np.empty(0, dtype=np.int32)
        self._ones: IntArray = np.empty(0, dtype=np.int32)
        self._trues: BoolArray = np.empty(0, dtype=np.bool_)
        self.num_in_flight = 0  # steps that have not landed
        self._slots: list[int] = []  # of the rows that are no decodes
        self._counts: list[int] = []
        self._new: list[RequestStart] = []
        self._resumed: list[RequestStart] = []
        self._updates: list[BlockTableUpdate] = []

    @property
    def has_rows(self) -> bool:
        return len(self._decodes) > 0 or bool(self._slots)

    def add_decodes(self, slots: LongArray) -> None:
        """Rows that get one token and sample the next one; the array is kept, and never changed."""
        self._decodes = slots

    def add_prefill(self, slot: int, count: int) -> None:
        """A row that gets `count` tokens of those that are known."""
        self._slots.append(slot)
        self._counts.append(count)

    def add_start(
        self, request: Request, slot: Slot, is_resumed: bool, num_cached_tokens: int, allocation: Allocation
    ) -> None:
        """A request that enters the batch; its row is added by `add_prefill` besides."""
        (self._resumed if is_resumed else self._new).append(
            RequestStart(
                request_id=request.request_id,
                slot=slot,
                token_ids=request.token_ids.copy(),
                num_prompt_tokens=request.num_prompt_tokens,
                num_computed_tokens=num_cached_tokens,
                block_ids=allocation.new_block_ids,
                params=request.core.params,
                lora_name=request.core.lora_name,
                stop_token_ids=request.core.stop_token_ids,
                bad_words_token_ids=request.core.bad_words_token_ids,
            )
        )

    def add_blocks(self, slot: int, start: int, allocation: Allocation) -> None:
        """The tables of a running request grew from block `start` on."""
        name = self._table.names[slot]
        for group, block_ids in enumerate(allocation.new_block_ids):
            self._updates.append(BlockTableUpdate(name, group, start, block_ids))

    def add_block_each(self, slots: Sequence[int], starts: Sequence[int], block_ids: Sequence[IntArray]) -> None:
        """The tables of these running requests grew by a block, [len(slots)] per KV group."""
        names = self._table.names
        for group, of_group in enumerate(block_ids):
            for row, (slot, start) in enumerate(zip(slots, starts, strict=True)):
                self._updates.append(BlockTableUpdate(names[slot], group, start, of_group[row : row + 1]))

    def add_ended(self, slot: int) -> None:
        """The request of this slot left the batch."""
        self._ended.append(self._table.names[slot])
        if self._updates:  # blocks that it got in this step are given back with the others
            self._updates = [update for update in self._updates if update.slot.index != slot]

    def finish(
        self, now: float, paused: Sequence[Slot] = (), host_transfers: Sequence[HostTransfer] = ()
    ) -> SchedulerOutput:
        """The step, counted as in flight from now on; a row was added to it."""
        table = self._table
        slots, counts = self._rows()
        before = table.num_computed[slots]
        after = before + counts
        samples = self._trues[: len(slots)]
        if self._slots:
            samples = after == table.known_tokens(slots, has_steps_in_flight=self.num_in_flight > 0)
        output = SchedulerOutput(
            step=self.num_steps,
            scheduled_at=now,
            new=tuple(self._new),
            resumed=tuple(self._resumed),
            slots=slots,
            generations=self._generations_of(slots),
            num_computed_tokens=before,
            num_scheduled_tokens=counts,
            samples=samples,
            wants_prompt_logprobs=self._wants_prompt_logprobs(after),
            block_table_updates=tuple(self._updates),
            finished=tuple(self._ended),
            paused=paused,
            host_transfers=host_transfers,
        )
        table.num_computed[slots] = after
        if self.num_in_flight:
            table.tokens_in_flight[slots] += counts
            table.sampled_in_flight[slots] += samples
        else:  # alone in flight, as every step of a loop that does not overlap
            table.tokens_in_flight[slots] = counts
            table.sampled_in_flight[slots] = samples
        self.num_in_flight += 1
        self.num_steps += 1
        self.num_prefills = len(self._slots)
        self._ended.clear()
        self._clear()
        return output

    def land(self, output: SchedulerOutput) -> None:
        """A step has come back: what it had in flight is so no longer."""
        table, slots = self._table, output.slots
        self.num_in_flight -= 1
        if self.num_in_flight:
            table.tokens_in_flight[slots] -= output.num_scheduled_tokens
            table.sampled_in_flight[slots] -= output.samples
        else:
            table.tokens_in_flight[slots] = table.sampled_in_flight[slots] = 0

    def _rows(self) -> tuple[LongArray, IntArray]:
        """Slots and counts. Decodes first, then the others as they came."""
        slots, num_rows = self._decodes, len(self._decodes) + len(self._slots)
        if num_rows > len(self._ones):
            self._ones, self._trues = _frozen(np.ones(num_rows, np.int32)), _frozen(np.ones(num_rows, np.bool_))
        counts = self._ones[:num_rows]
        if self._slots:
            slots = np.concatenate((slots, np.array(self._slots, dtype=np.intp)))
            counts = counts.copy()
            counts[len(self._decodes) :] = self._counts
        return slots, counts

    def _wants_prompt_logprobs(self, ends: IntArray) -> BoolArray | None:
        """[R] of rows whose tokens up to `ends` [R] are computed then; None = none. Decodes compute no such token."""
        if not self._slots or not self._table.num_with_prompt_logprobs:
            return None
        wants = np.zeros(len(ends), dtype=np.bool_)
        for row, slot in enumerate(self._slots, len(self._decodes)):
            request = self._table.requests[slot]
            wants[row] = request is not None and request.lacks_prompt_logprobs(int(ends[row]))
        return wants if wants.any() else None

    def _generations_of(self, slots: LongArray) -> IntArray:
        """A slot is left and taken again only with a new array of slots, so the same array has the same generations."""
        if slots is not self._last_slots:
            self._last_slots, self._generations = slots, _frozen(self._table.generation[slots])
        return self._generations

    def _clear(self) -> None:
        self._decodes = NO_SLOTS
        for rows in (self._slots, self._counts, self._new, self._resumed, self._updates):
            rows.clear()


def _frozen(array: ArrayT) -> ArrayT:
    """Read-only: it is handed out in more than one output."""
    array.flags.writeable = False
    return array
