"""`scheduler=edf`: the earliest deadline first."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.errors import ConfigError
from tokenyard.interfaces import AdmitDecision, SchedulingPolicy, keep_turns, service_alone
from tokenyard.request import ServiceLevel

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView


@dataclass(frozen=True, slots=True, kw_only=True)
class EDFOptions:
    """Options of the policy, under `scheduler.policy`."""

    preempt: bool = False  # what is due earlier displaces what is due later, in `scheduler.preempt_mode`
    drop_late: bool = False  # reject what cannot be in time even alone, by the latency model and the predictor
    default_seconds: float | None = None  # after arrival, of requests that say nothing; null = after all others

    def __post_init__(self) -> None:
        if self.default_seconds is not None and not 0 < self.default_seconds < math.inf:  # also refuses NaN
            raise ValueError(f"default_seconds={self.default_seconds} is not valid: a number above 0, or null")


class EDFPolicy(SchedulingPolicy):
    """Earliest deadline first (Liu and Layland 1973; preemptive it is optimal on one machine: Dertouzos 1974).

    A request is due at its deadline, at arrival + `slo.e2e`, or, while it has no token, at arrival + `slo.ttft`: at the
    earliest of those that it has. A preempted request keeps its place; blocks are taken from who is due last. With
    `drop_late`, who has not run yet is rejected once it would be late even if nothing else ran.
    """

    def __init__(self, options: EDFOptions, context: PolicyContext) -> None:
        if options.drop_late and not context.has_latency:
            need = "latency=linear or latency=constant with its times"
            raise ConfigError(f"drop_late=true of the policy edf has to know how long a step takes: set {need}")
        self._options, self._context = options, context
        self.may_starve = options.default_seconds is None

    def waiting_key(self, request: RequestView, view: SchedulerView) -> float:
        if (due := min(_dues(request))) < math.inf or self._options.default_seconds is None:
            return due
        return request.arrival_time + self._options.default_seconds

    requeue_key = waiting_key

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        return max(candidates, key=lambda one: (self.waiting_key(one, view), one.arrival_time, one.request_id))

    def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
        if self._options.drop_late and not request.attained_service and min(_dues(request)) < math.inf:
            alone = service_alone(request, view, self._context)
            for what, due, takes in zip(("first", "last"), _dues(request), (alone.ttft, alone.e2e), strict=True):
                if (left := due - view.now) < takes:
                    return AdmitDecision.reject(f"its {what} token is due in {left:.3g} s, alone takes {takes:.3g} s")
        return AdmitDecision.accept()


class PreemptiveEDFPolicy(EDFPolicy):
    """With `preempt`; a class of its own, since a policy that orders what runs is asked in each step."""

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return keep_turns(running, view, self._context, lambda one: (self.waiting_key(one, view),))


def _dues(request: RequestView) -> tuple[float, float]:
    """When the first token is due, if it is still to come, and the last; inf = whenever."""
    ttft, _, e2e = request.service_level or ServiceLevel()
    first = math.inf if ttft is None or request.num_output_tokens else request.arrival_time + ttft
    last = math.inf if e2e is None else request.arrival_time + e2e
    return first, last if request.deadline is None else min(last, request.deadline)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[EDFOptions]]:
    yield PolicyDescriptor(
        name="edf",
        api_version=(1, 7),
        summary="the earliest deadline first, optionally displacing later ones, or rejecting what would be late",
        options_type=EDFOptions,
        factory=lambda options, context: (PreemptiveEDFPolicy if options.preempt else EDFPolicy)(options, context),
    )
