"""`scheduler=least-computed`: who has computed least gives up its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import SchedulingPolicy

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView


@dataclass(frozen=True, slots=True, kw_only=True)
class LeastComputedOptions:
    """Options of the policy, under `scheduler.policy`."""

    headroom: float = 1.0  # blocks for each running request that whoever enters leaves free; 0 = none

    def __post_init__(self) -> None:
        if not 0 <= self.headroom < float("inf"):  # also refuses NaN
            raise ValueError(f"headroom={self.headroom} is not valid: it must be a number of blocks, 0 or more")


class LeastComputedPolicy(SchedulingPolicy):
    """The victim with the fewest computed tokens (vLLM RFC #54644): what it loses is the least to compute again.

    Of equals who came last. Order is that of fcfs, and a victim goes in front: who was preempted is the first to enter.
    A small victim gives back few blocks, and would soon come back into them only to be the smallest again. So nobody
    enters who does not leave `headroom` blocks for each that runs; where nothing runs the first one always does.
    """

    def __init__(self, options: LeastComputedOptions, context: PolicyContext) -> None:
        self._headroom, self._limits = options.headroom, context

    def max_running(self, view: SchedulerView) -> int | None:
        """As many as fit, looking no further than a step's tokens go."""
        num_running, num_blocks, num_tokens = (
            view.num_running,
            view.num_free_blocks,
            self._limits.max_num_batched_tokens,
        )
        for number, one in enumerate(view.waiting(self._limits.max_num_seqs - num_running), start=num_running):
            num_blocks -= view.num_blocks_needed(one)
            if number and num_blocks < self._headroom * number:
                return number
            num_tokens -= one.num_prompt_tokens + one.num_output_tokens - view.hit_tokens(one)
            if num_tokens <= 0:
                return number + 1
        return None

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        latest_first = sorted(candidates, key=lambda one: (one.arrival_time, one.request_id), reverse=True)
        return min(latest_first, key=lambda one: one.num_computed_tokens)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[LeastComputedOptions]]:
    yield PolicyDescriptor(
        name="least-computed",
        api_version=(1, 7),
        summary="first come, first served; who has computed least gives up its blocks",
        options_type=LeastComputedOptions,
        factory=LeastComputedPolicy,
    )
