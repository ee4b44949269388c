"""`scheduler=cost-aware`: blocks are taken where each costs the least work."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import SchedulingPolicy

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView


@dataclass(frozen=True, slots=True, kw_only=True)
class CostAwareOptions:
    """Options of the policy, under `scheduler.policy`."""

    spare_within: int = 16  # output tokens: who is predicted to end so soon is no victim while others are there

    def __post_init__(self) -> None:
        if self.spare_within < 0:
            raise ValueError(f"spare_within={self.spare_within} is not valid: it must be 0 or more output tokens")


class CostAwarePolicy(SchedulingPolicy):
    """A victim by what its blocks cost (vLLM #56897 proposes a score of this kind; the formula is our own).

    Score = tokens to compute again / blocks given back, the smallest first; of equals who came last. Blocks that others
    hold too are not given back, and their tokens are not lost. Who is predicted to end soon gives its blocks back by
    itself: it is spared. Order is that of fcfs, and a victim goes in front.
    """

    def __init__(self, options: CostAwareOptions, context: PolicyContext) -> None:
        self._spare_within = options.spare_within

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        def ends_soon(one: RequestView) -> bool:
            return view.predictor.output_len(one) - one.num_output_tokens <= self._spare_within

        latest_first = sorted(candidates, key=lambda one: (one.arrival_time, one.request_id), reverse=True)
        return min(latest_first, key=lambda one: (ends_soon(one), _score(one, view)))


def _score(request: RequestView, view: SchedulerView) -> float:
    given = view.num_exclusive_blocks(request)
    kept = (view.num_blocks(request) - given) * view.block_size
    return max(0, request.num_computed_tokens - kept) / given if given else math.inf


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[CostAwareOptions]]:
    yield PolicyDescriptor(
        name="cost-aware",
        api_version=(1, 7),
        summary="first come, first served; blocks are taken where each costs least, and from nobody who ends soon",
        options_type=CostAwareOptions,
        factory=CostAwarePolicy,
    )
