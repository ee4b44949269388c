"""Preemption: blocks for running requests, taken from others when none are free."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.interfaces.policy import Preemption, PreemptMode
from tokenyard.interfaces.scheduler import RequestStatus, WaitReason

if TYPE_CHECKING:
    from tokenyard.arrays import BoolArray, IntArray, LongArray
    from tokenyard.interfaces.kv_cache import KVCacheManager
    from tokenyard.scheduler.events import RequestEvents
    from tokenyard.scheduler.policy_calls import PolicyCalls
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.running import RunningBatch
    from tokenyard.scheduler.slots import SlotTable
    from tokenyard.scheduler.step import StepBuilder
    from tokenyard.scheduler.waiting import WaitingQueue


class BlockGrowth:
    """Grows block tables at block boundaries. A victim is recomputed later: all its blocks are given back."""

    def __init__(
        self,
        *,
        table: SlotTable,
        kv_cache_manager: KVCacheManager,
        running: RunningBatch,
        waiting: WaitingQueue,
        steps: StepBuilder,
        policy: PolicyCalls,
        events: RequestEvents,
        block_size: int,
    ) -> None:
        self._table = table
        self._kv = kv_cache_manager
        self._running = running
        self._waiting = waiting
        self._steps = steps
        self._policy = policy
        self._events = events
        self._block_size = block_size
        self.num_preemptions = 0
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
        named = slots[lacking]
        starts = -(-table.valid_until[named] // self._block_size)
        waits = []
        for slot, start, num_tokens in zip(named.tolist(), starts.tolist(), known[lacking].tolist(), strict=True):
            request = table.requests[slot]
            if request is not None and not self._grow_one(request, slot, start, num_tokens):
                waits.append(slot)
        if not self.has_preempted and not waits:
            return None
        self.is_short = bool(waits)
        return table.is_held[slots] & ~np.isin(slots, waits)

    def _grow_one(self, request: Request, slot: int, start: int, num_tokens: int) -> bool:
        """Preempt until the row has its block or is gone. False: it has to wait for blocks of steps in flight."""
        while (allocation := self._kv.allocate(request, num_tokens)) is None:
            if self._running.has_blocks_in_flight:
                return False  # taking more away would be more than what lacks
            self._preempt_one()
            if self._table.requests[slot] is not request:
                return True
        self._table.valid_until[slot] = allocation.valid_until_tokens
        self._steps.add_blocks(slot, start, allocation)
        return True

    def _preempt_one(self) -> None:
        victim = self._policy.victim(list(self._running.requests.values()), 1)
        preemption = Preemption(victim, victim.num_computed_tokens, PreemptMode.RECOMPUTE)
        self._events.preempted(victim, victim.num_computed_tokens, WaitReason.KV_BLOCKS.value)
        self._running.leave(victim, RequestStatus.PREEMPTED)
        self.num_preemptions += 1
        self.has_preempted = True
        victim.num_preemptions += 1
        self._policy.on_preempt([preemption])
        self._requeue(victim)

    def restart(self, request: Request) -> None:
        """Back into the line because what is in flight for a request is of no use."""
        self._events.preempted(request, request.num_computed_tokens, "step_discarded")
        self._running.leave(request, RequestStatus.PREEMPTED, drops_steps=True)
        self._requeue(request)

    def _requeue(self, request: Request) -> None:
        """By the policy's key, or in front of everybody."""
        key = self._policy.requeue_key(request)
        if key is None:
            self._waiting.push_front(request)
        else:
            self._waiting.push(request, key)
