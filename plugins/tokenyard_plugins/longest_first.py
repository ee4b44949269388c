"""`scheduler=longest-first`: the longest job first; a bound for research."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import SchedulingPolicy

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView
    from tokenyard.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class LongestFirstOptions:
    """Options of the policy, under `scheduler.policy`."""

    output_weight: float = 1.0  # tokens of prompt that one token of output costs

    def __post_init__(self) -> None:
        if not 0 <= self.output_weight < math.inf:  # also refuses NaN
            raise ValueError(f"output_weight={self.output_weight} is not valid: it must be a number, at least 0")


class LongestFirstPolicy(SchedulingPolicy):
    """Longest processing time first (Graham 1969): `sjf` the other way round.

    Size = prompt tokens + `output_weight` times the output that `scheduler.predictor` expects. The worst order for the
    mean wait, and for that reason a bound; a good one for the end of a batch job, since nothing long is left alone at
    the end. Short requests starve under a steady load. A preempted request keeps its place.
    """

    may_starve = True

    def __init__(self, options: LongestFirstOptions, context: PolicyContext) -> None:
        self._weight = options.output_weight
        self._keys: dict[str, float] = {}  # of live requests

    def waiting_key(self, request: RequestView, view: SchedulerView) -> float:
        size = request.num_prompt_tokens + self._weight * view.predictor.output_len(request)
        self._keys[request.request_id] = -size
        return -size

    def requeue_key(self, request: RequestView, view: SchedulerView) -> float:
        return self._keys[request.request_id]

    def on_finish(self, requests: Sequence[RequestView], reasons: Sequence[FinishReason], view: SchedulerView) -> None:
        for request in requests:
            self._keys.pop(request.request_id, None)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[LongestFirstOptions]]:
    yield PolicyDescriptor(
        name="longest-first",
        api_version=(1, 7),
        summary="longest job first, by prompt and predicted output: a bound to compare with",
        options_type=LongestFirstOptions,
        factory=LongestFirstPolicy,
    )
