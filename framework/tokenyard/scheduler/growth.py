"""BlockGrowth: blocks for running requests, taken from others when none are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.interfaces.scheduler import WaitReason
from tokenyard.scheduler.block_needs import num_blocks_needed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import BoolArray, IntArray, LongArray
    from tokenyard.interfaces.kv_cache import Allocation, KVCacheManager
    from tokenyard.scheduler.preemption import Preemptor
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.running import RunningBatch
    from tokenyard.scheduler.slots import SlotTable
    from tokenyard.scheduler.step import StepBuilder


class BlockGrowth:
    """Grows block tables at block boundaries."""

    def __init__(
        self,
        *,
        table: SlotTable,
        kv_cache_manager: KVCacheManager,
        running: RunningBatch,
        steps: StepBuilder,
        preemptor: Preemptor,
        block_size: int,
    ) -> None:
        self._table = table
        self._kv = kv_cache_manager
        self._running = running
        self._steps = steps
        self._preemptor = preemptor
        self._block_size = block_size
        self.is_short = False  # whether a row of the current step did not get its block
        self.has_preempted = False  # in the current step

    def begin_step(self) -> None:
        """A step begins."""
        self.is_short = self.has_preempted = False

    def grow(self, slots: LongArray, known: IntArray, lacking: BoolArray) -> BoolArray | None:
        """Let the tables of the lacking rows hold their `known` tokens. Returns which rows can run, None when all can.

        No row has been given to the step yet, so everybody who runs may be a victim, and nobody who is one has run.
        """
        table = self._table
        named, wanted = slots[lacking], known[lacking]
        held = table.valid_until[named]
        starts = -(-held // self._block_size)
        is_one_enough = not np.count_nonzero(wanted > held + self._block_size)
        if is_one_enough and self._grow_by_one(named, starts):
            return None
        waits = []
        for slot, start, num_tokens in zip(named.tolist(), starts.tolist(), wanted.tolist(), strict=True):
            request = table.requests[slot]
            if request is None:  # somebody before it took its blocks
                continue
            allocation = self._kv.allocate(request, num_tokens) or self._allocate_by_force(request, num_tokens)
            if allocation is not None:
                table.valid_until[slot] = allocation.valid_until_tokens
                self._steps.add_blocks(slot, start, allocation)
            elif table.requests[slot] is request:
                waits.append(slot)
        if not self.has_preempted and not waits:
            return None
        self.is_short = bool(waits)
        return table.is_held[slots] & ~np.isin(slots, waits)

    def make_room(self, request: Request) -> bool:
        """Take blocks away from paused requests until `request` can enter; False, with nothing changed, if it is vain.

        Blocks that they share with others, and those of steps in flight, would not be free at once.
        """
        paused = self._running.paused
        if not paused or self._running.has_blocks_in_flight:
            return False
        losers = tuple(paused.values())
        if sum(map(self._kv.num_exclusive_blocks, losers)) < self._num_lacking(request, losers):
            return False
        while paused and self._num_lacking(request) > 0 and not self._running.has_blocks_in_flight:
            candidates = [one for one in self._running.requests.values() if one.is_paused]
            victim = self._preemptor.take_blocks(candidates, WaitReason.KV_BLOCKS.value)
            self._preemptor.displaced.add(victim.request_id)
        return self._num_lacking(request) <= 0

    def _num_lacking(self, request: Request, without: Sequence[Request] = ()) -> int:
        """Blocks that have to become free for `request`, when those of `without` hold none of its hit any more."""
        needed = num_blocks_needed(self._kv, request, self._block_size, without)
        return needed - self._kv.usage.num_free_blocks

    def _grow_by_one(self, slots: LongArray, starts: IntArray) -> bool:
        """A further block for each of these, which have `starts`; False, with nothing changed: too few are free."""
        table, rows = self._table, slots.tolist()
        block_ids = self._kv.allocate_next([request for slot in rows if (request := table.requests[slot]) is not None])
        if block_ids is None:
            return False
        table.valid_until[slots] += self._block_size
        self._steps.add_block_each(rows, starts.tolist(), block_ids)
        return True

    def _allocate_by_force(self, request: Request, num_tokens: int) -> Allocation | None:
        """Preempt until there are blocks. None: `request` is gone itself, or waits for blocks of steps in flight."""
        slot = request.slot
        while (allocation := self._kv.allocate(request, num_tokens)) is None:
            if self._running.has_blocks_in_flight:
                return None  # taking more away would be more than what lacks
            self._preemptor.take_blocks(list(self._running.requests.values()), WaitReason.KV_BLOCKS.value)
            self.has_preempted = True
            if request.slot != slot:
                return None
        return allocation
