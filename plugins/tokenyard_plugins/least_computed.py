"""`scheduler=least-computed`: who has computed least gives up its blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import SchedulingPolicy

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView


class LeastComputedPolicy(SchedulingPolicy):
    """The victim with the fewest computed tokens (vLLM RFC #54644): what it loses is the least to compute again.

    Of equals who came last. Order is that of fcfs, and a victim goes in front: who was preempted is the first to enter.
    """

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        latest_first = sorted(candidates, key=lambda one: (one.arrival_time, one.request_id), reverse=True)
        return min(latest_first, key=lambda one: one.num_computed_tokens)


def _make(options: NoOptions, context: PolicyContext) -> SchedulingPolicy:
    return LeastComputedPolicy()


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[NoOptions]]:
    yield PolicyDescriptor(
        name="least-computed",
        api_version=(1, 6),
        summary="first come, first served; who has computed least gives up its blocks",
        factory=_make,
    )
