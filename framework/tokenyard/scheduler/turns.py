"""RunningTurns: which running requests get tokens in a step, and how many."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import IntArray, LongArray
    from tokenyard.config import SchedulerConfig
    from tokenyard.scheduler.growth import BlockGrowth
    from tokenyard.scheduler.policy_calls import PolicyCalls
    from tokenyard.scheduler.preemption import Preemptor
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.running import RunningBatch
    from tokenyard.scheduler.slots import SlotTable
    from tokenyard.scheduler.step import StepBuilder


class RunningTurns:
    """Decodes first, all of them, then prefills in order: of admission, or the policy's."""

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        table: SlotTable,
        running: RunningBatch,
        steps: StepBuilder,
        growth: BlockGrowth,
        preemptor: Preemptor,
        policy: PolicyCalls,
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._budget = config.max_num_batched_tokens
        self._can_chunk = config.enable_chunked_prefill
        self._max_chunk = config.long_prefill_token_threshold or self._budget
        self._table = table
        self._running = running
        self._steps = steps
        self._growth = growth
        self._preemptor = preemptor
        self._policy = policy

    def take(self, *, somebody_waits: bool) -> int:
        """Give tokens to what runs already; returns how many are left for those that enter."""
        table, slots = self._table, self._slots()
        has_steps_in_flight = self._steps.num_in_flight > 0
        known = table.known_tokens(slots, has_steps_in_flight=has_steps_in_flight)
        missing = known - table.num_computed[slots]
        if has_steps_in_flight:  # a row whose last token is being sampled already has nothing more to compute
            missing[known >= table.max_total_tokens[slots]] = 0
        is_decode = missing == 1
        is_all = np.count_nonzero(is_decode) == len(slots)
        can_run = None
        lacking = known > table.valid_until[slots]
        if np.count_nonzero(lacking):
            can_run = self._growth.grow(slots, known, lacking if is_all else lacking & (missing > 0))
        if is_all and can_run is None:
            self._steps.add_decodes(slots)
            return self._left(len(slots)) if somebody_waits else 0
        if can_run is not None:
            missing *= can_run
            is_decode = missing == 1
        decodes = slots[is_decode]
        self._steps.add_decodes(decodes)
        is_prefill = missing > 1
        return self._take_prefills(slots[is_prefill], missing[is_prefill], self._left(len(decodes)))

    def _left(self, num_decodes: int) -> int:
        """Tokens for prefills, new ones included. Decodes are never held back by a budget."""
        left = max(0, self._policy.token_budget(self._budget) - num_decodes)
        return self._policy.prefill_budget(left)

    def _take_prefills(self, slots: LongArray, missing: IntArray, left: int) -> int:
        for slot, num_missing in zip(slots.tolist(), missing.tolist(), strict=True):
            if left <= 0:
                break
            count = min(num_missing, left, self._max_chunk)
            if self._policy.sizes_chunks and self._can_chunk and (request := self._table.requests[slot]) is not None:
                count = self._policy.chunk_size(request, count)
            if count:
                self._steps.add_prefill(slot, count)
                left -= count
        return left

    # Whose turn it is

    def _slots(self) -> LongArray:
        """[R] of those that may run in this step, in order."""
        if self._policy.orders_running and len(self._running):
            running = list(self._running.requests.values())
            chosen = self._policy.running_order(running)[: self._max_num_seqs]
            self._take_turns(running, chosen)
            if len(chosen) < len(running) or any(one is not other for one, other in zip(chosen, running, strict=True)):
                return np.array([request.slot for request in chosen], dtype=np.intp)
        elif self._running.paused:
            self._give_turns()
        return self._running.active_slots()

    def _take_turns(self, running: Sequence[Request], chosen: Sequence[Request]) -> None:
        if len(chosen) < len(running):
            stays = {request.request_id for request in chosen}
            for request in running:
                if request.request_id not in stays:
                    self._preemptor.take_turn(request)
        if self._running.paused:
            for request in chosen:
                self._preemptor.give_turn(request)

    def _give_turns(self) -> None:
        """Nobody says who is to go on: as many as may, in order of admission."""
        for request in list(self._running.requests.values()):
            if self._running.num_active < self._max_num_seqs:
                self._preemptor.give_turn(request)
