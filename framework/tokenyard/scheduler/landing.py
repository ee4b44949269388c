"""Landing: what a step that has come back means for blocks, for other steps in flight and for the policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.scheduler.outcomes import OutcomeMaker

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenyard.arrays import LongArray
    from tokenyard.interfaces.kv_cache import KVCacheManager
    from tokenyard.interfaces.outcomes import StepOutcomes
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler.preemption import Preemptor
    from tokenyard.scheduler.running import Landed, RunningBatch
    from tokenyard.scheduler.sampled import Taken
    from tokenyard.scheduler.slots import SlotTable
    from tokenyard.scheduler_output import SchedulerOutput


class Landing:
    """Called for a step once its tokens were taken in."""

    def __init__(
        self,
        *,
        table: SlotTable,
        kv_cache_manager: KVCacheManager,
        running: RunningBatch,
        preemptor: Preemptor,
        block_size: int,
    ) -> None:
        self._table = table
        self._kv = kv_cache_manager
        self._running = running
        self._preemptor = preemptor
        self._block_size = block_size
        self._outcomes = OutcomeMaker(table)
        self._commits = kv_cache_manager.needs_commits

    def commit(self, slots: LongArray, failed: Mapping[str, str]) -> None:
        """Publish the blocks that this step completed, but for requests that failed: nobody knows what is in theirs."""
        if not self._commits:
            return
        table, size = self._table, self._block_size
        computed = table.num_computed[slots] - table.tokens_in_flight[slots]
        full = computed >= table.commit_at[slots]
        if not np.count_nonzero(full):
            return
        slots, computed = slots[full], computed[full]
        table.commit_at[slots] = (computed // size + 1) * size
        for slot, num_computed in zip(slots.tolist(), computed.tolist(), strict=True):
            request = table.requests[slot]
            if request is not None and request.request_id not in failed:
                self._kv.commit(request, num_computed)

    def step_back(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Rows that were to sample and did not compute their last token once more: otherwise they would stand still.

        Before `commit`, after which a window group no longer holds what that token reads.
        """
        table = self._table
        for slot in output.slots[output.samples & (result.num_sampled == 0)].tolist():
            if table.requests[slot] is not None and not table.tokens_in_flight[slot]:
                table.service_before[slot] += 1
                table.num_computed[slot] -= 1

    def restart_odd(self, output: SchedulerOutput, result: ModelRunnerOutput, landed: Landed) -> None:
        """What is in flight builds on one token, the next: where there was none, or several, it is worth nothing."""
        for row, _ in landed.preempted:
            if output.samples[row] and result.num_sampled[row] != 1:
                self._running.drop_steps(int(output.slots[row]))
        for slot in output.slots[output.samples & (result.num_sampled != 1)].tolist():
            request = self._table.requests[slot]
            if request is not None and self._table.tokens_in_flight[slot]:
                self._preemptor.restart(request)

    def outcomes(self, output: SchedulerOutput, taken: Taken, landed: Landed, ended: set[str]) -> StepOutcomes:
        """What the step did, for a policy that wants to be told."""
        return self._outcomes.outcomes(output, taken, landed, ended)
