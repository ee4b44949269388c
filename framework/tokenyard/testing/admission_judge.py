"""AdmissionJudge: nobody waits who could have run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenyard.interfaces.scheduler import WaitReason
from tokenyard.testing.errors import ContractViolation
from tokenyard.testing.invariants import snapshot_of
from tokenyard.testing.policy_calls import PolicyAnswers

if TYPE_CHECKING:
    from tokenyard.config import EngineConfig
    from tokenyard.engine_outputs import SchedulerStats
    from tokenyard.interfaces.scheduler import RequestSnapshot
    from tokenyard.launch.assemble import EngineParts
    from tokenyard.scheduler_output import SchedulerOutput

_MAY_WAIT = frozenset({WaitReason.PREEMPTION, WaitReason.BLOCKS_IN_FLIGHT, WaitReason.PAUSED})


class AdmissionJudge:
    """Looks at each step as it is handed to the executor (work conservation).

    Room is what the config and the policy leave: places (paused requests hold none), tokens, free blocks. Who is first
    is the policy's to say; whoever it defers, or leaves out of its order, is passed over. In a step that took something
    away from a request nobody need enter.
    """

    def __init__(self, config: EngineConfig, parts: EngineParts, num_groups: int) -> None:
        self._limits = config.scheduler
        self._block_size = config.kv_cache.block_size
        self._scheduler = parts.scheduler
        self._manager = parts.kv_cache_manager
        self._num_groups = num_groups
        self._num_preemptions = 0
        self._answers = PolicyAnswers(parts.policy)
        self.is_paused = False

    def judge(self, output: SchedulerOutput) -> None:
        """Raise ContractViolation when the first in line would have fitted into this step."""
        stats = self._scheduler.stats()
        has_preempted, self._num_preemptions = stats.num_preemptions > self._num_preemptions, stats.num_preemptions
        num_places = self._answers.limit("max_running", self._limits.max_num_seqs)
        is_full = stats.num_running - stats.num_paused >= num_places
        if self.is_paused or has_preempted or is_full or not stats.num_waiting:
            return
        heads = self._heads()
        left = self._tokens_left(output)
        if heads and heads[0].wait_reason not in _MAY_WAIT and all(self._fits(head, left) for head in heads):
            raise self._violation(heads, output, stats)

    def _heads(self) -> Sequence[RequestSnapshot]:
        """The first in line, and the first of the policy's order where it has one.

        A step that was made without the policy (see SchedulingPolicy) went by the line, so both must fit.
        """
        snapshot = snapshot_of(self._scheduler)
        waiting = () if snapshot is None else snapshot.waiting
        rows = {row.request_id: row for row in waiting if row.wait_reason is not WaitReason.DEFERRED}
        first = next((rows[name] for name in self._answers.order if name in rows), None)
        return [*list(rows.values())[:1], *([] if first is None else [first])]

    def _tokens_left(self, output: SchedulerOutput) -> int:
        """Decodes count as prefills here: that only makes less fit."""
        budget = self._answers.limit("token_budget", self._limits.max_num_batched_tokens)
        return self._answers.limit("prefill_budget", budget) - output.total_num_scheduled_tokens

    def _fits(self, head: RequestSnapshot, left: int) -> bool:
        """Prefix hits are not counted: they would only make it fit more easily."""
        num_tokens = head.num_prompt_tokens + head.num_output_tokens
        num_blocks = self._num_groups * -(-num_tokens // self._block_size)
        needs = 1 if self._limits.enable_chunked_prefill else num_tokens
        return left >= needs and num_blocks <= self._manager.usage.num_free_blocks

    def _violation(
        self, heads: Sequence[RequestSnapshot], output: SchedulerOutput, stats: SchedulerStats
    ) -> ContractViolation:
        line, head = heads[0], heads[-1]  # only the first in line has a reason of its own
        reason = None if line.wait_reason is None else line.wait_reason.value
        num_tokens, most = output.total_num_scheduled_tokens, self._limits.max_num_batched_tokens
        return ContractViolation(
            "progress.work_conserving",
            f"'{head.request_id}' waits ({reason}, {line.wait_detail}) although step {output.step} had room: "
            f"{num_tokens} of {most} tokens, {stats.num_running} of {self._limits.max_num_seqs} running, "
            f"{stats.num_free_blocks} blocks free",
        )
