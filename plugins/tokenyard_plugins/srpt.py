"""`scheduler=srpt`: the shortest remaining work runs, with limited preemption."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import PreemptMode, SchedulingPolicy, keep_turns

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView
    from tokenyard.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class SRPTOptions:
    """Options of the policy, under `scheduler.policy`."""

    output_weight: float = 1.0  # tokens of prompt that one token of output costs
    limit: float | None = None  # share of its output at which nobody is displaced any more; null = by the mode
    ageing_seconds: float | None = None  # being there this long counts as one token less; None = no ageing

    def __post_init__(self) -> None:
        for name, value in (("output_weight", self.output_weight), ("ageing_seconds", self.ageing_seconds)):
            if value is not None and not 0 < value < float("inf"):  # also refuses NaN
                raise ValueError(f"{name}={value} is not valid: it must be a number above 0")
        if self.limit is not None and not 0 <= self.limit <= 1:
            raise ValueError(f"limit={self.limit} is not valid: it must be from 0 (nobody is displaced) to 1, or null")


class SRPTPolicy(SchedulingPolicy):
    """Shortest remaining processing time (Schrage 1968), with the limit of TRAIL (arXiv 2410.01035).

    Remaining work = known tokens whose K/V is not there + `output_weight` times the output tokens still to come, as
    `scheduler.predictor` has it. What runs is looked at again in each step; of what waits that K/V counts as there that
    the cache has, or host memory where it was swapped out, when it begins to wait. An arrival with less displaces who
    has most, but nobody who has `limit` of its output already: it holds much K/V and is nearly done. The limit is 0.8
    if none is given, and 1, which is none, where preempt_mode is pause, since that costs no work. Seconds age everybody
    alike: remaining + arrival / `ageing_seconds` compares as it would at any time. Blocks are taken from who has most.
    """

    def __init__(self, options: SRPTOptions, context: PolicyContext) -> None:
        self._weight, self._limits = options.output_weight, context
        default_limit = 1.0 if context.preempt_mode is PreemptMode.PAUSE else 0.8
        self._limit = default_limit if options.limit is None else options.limit
        self._ageing = 1 / options.ageing_seconds if options.ageing_seconds else 0.0
        self.may_starve = options.ageing_seconds is None
        self._queued: dict[str, float] = {}  # of those that wait, as they stand in line

    def waiting_key(self, request: RequestView, view: SchedulerView) -> float:
        key = self._queued[request.request_id] = self._left(request, view.hit_tokens(request), view)
        return key

    requeue_key = waiting_key

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        def may_lose(one: RequestView) -> bool:
            return one.num_output_tokens < self._limit * view.predictor.output_len(one)

        columns, output_len = view.running_columns, view.predictor.output_len
        known = columns.num_prompt_tokens + columns.num_output_tokens
        to_come = self._weight * (np.array([output_len(one) for one in running]) - columns.num_output_tokens)
        keys = known - columns.num_computed_tokens + to_come + self._ageing * columns.arrival_time
        return keep_turns(running, view, self._limits, lambda one: self._key(one, view), may_lose=may_lose, keys=keys)

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        return max(candidates, key=lambda one: (self._key(one, view), one.arrival_time, one.request_id))

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        for request in requests:
            self._queued.pop(request.request_id, None)

    def on_finish(self, requests: Sequence[RequestView], reasons: Sequence[FinishReason], view: SchedulerView) -> None:
        self.on_admit(requests, view)

    def _key(self, request: RequestView, view: SchedulerView) -> tuple[float]:
        queued = self._queued.get(request.request_id)
        return (self._left(request, request.num_computed_tokens, view) if queued is None else queued,)

    def _left(self, one: RequestView, num_computed: int, view: SchedulerView) -> float:
        to_come = self._weight * (view.predictor.output_len(one) - one.num_output_tokens)
        return one.num_prompt_tokens + one.num_output_tokens - num_computed + to_come + self._ageing * one.arrival_time


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[SRPTOptions]]:
    what = "shortest remaining work first, displacing what has more, by a predicted output"
    yield PolicyDescriptor(name="srpt", api_version=(1, 7), summary=what, options_type=SRPTOptions, factory=SRPTPolicy)
