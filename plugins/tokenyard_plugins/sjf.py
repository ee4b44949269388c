"""`scheduler=sjf`: the shortest job first, by the prompt and a predicted output."""

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
class SJFOptions:
    """Options of the policy, under `scheduler.policy`."""

    output_weight: float = 1.0  # tokens of prompt that one token of output costs; 0 = shortest prompt first
    residual: bool = False  # leave out of the prompt what the prefix cache has of it when the request arrives
    ageing_seconds: float | None = None  # waiting this long counts as one token less; None = no ageing

    def __post_init__(self) -> None:
        if not 0 <= self.output_weight < math.inf:  # also refuses NaN
            raise ValueError(f"output_weight={self.output_weight} is not valid: it must be a number, at least 0")
        if self.ageing_seconds is not None and not 0 < self.ageing_seconds < math.inf:
            raise ValueError(
                f"ageing_seconds={self.ageing_seconds} is not valid: it must be a number of seconds above 0, or null "
                "for no ageing"
            )


class SJFPolicy(SchedulingPolicy):
    """Shortest job first, not preemptive (Cobham 1954 has its mean wait; of LLMs Fu et al., NeurIPS 2024).

    Size = prompt tokens + `output_weight` times the output tokens that `scheduler.predictor` expects. Inputs: prompt,
    predicted output, arrival for ageing, the prefix cache for `residual`. A preempted request keeps its place; blocks
    are taken from the largest.
    """

    def __init__(self, options: SJFOptions, context: PolicyContext) -> None:
        self._options = options
        # Seconds age everybody alike, so size + arrival / ageing_seconds is an order that never changes.
        self._ageing = 1 / options.ageing_seconds if options.ageing_seconds else 0.0
        self.may_starve = options.ageing_seconds is None
        self._keys: dict[str, float] = {}  # of live requests, as they arrived

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        size = request.num_prompt_tokens + self._options.output_weight * view.predictor.output_len(request)
        if self._options.residual:
            size -= view.hit_tokens(request)
        key = self._keys[request.request_id] = size + self._ageing * request.arrival_time
        return key

    def requeue_key(self, request: RequestView, view: SchedulerView) -> object:
        return self._keys[request.request_id]

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        return max(candidates, key=lambda one: (self._keys[one.request_id], one.arrival_time, one.request_id))

    def on_finish(self, requests: Sequence[RequestView], reasons: Sequence[FinishReason], view: SchedulerView) -> None:
        for request in requests:
            self._keys.pop(request.request_id, None)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[SJFOptions]]:
    yield PolicyDescriptor(
        name="sjf",
        api_version=(1, 7),
        summary="shortest job first, by prompt and predicted output, with optional ageing",
        options_type=SJFOptions,
        factory=SJFPolicy,
    )
