"""`scheduler=priority`: the most urgent request first, optionally with ageing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.errors import ConfigError
from tokenyard.interfaces import SchedulingPolicy

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityOptions:
    """Options of the policy, under `scheduler.policy`."""

    ageing_seconds: float | None = None  # waiting this long counts as one level of priority; None = no ageing


class PriorityPolicy(SchedulingPolicy):
    """Lower value = more urgent; ties go by arrival, then id.

    It orders the line and picks whom to preempt when blocks are short: the least urgent request, the latest among
    equals. A running request is never stopped to make room in a full batch. A preempted request keeps its place in
    the order. Without ageing, a steady stream of urgent requests starves the others.
    """

    def __init__(self, ageing_seconds: float | None) -> None:
        # The effective priority at time t is priority - (t - arrival) / ageing. Between any two requests t cancels,
        # so the key never changes and a heap serves.
        self._ageing_seconds = ageing_seconds
        self.may_starve = ageing_seconds is None

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        if self._ageing_seconds is None:
            return request.priority
        return request.priority + request.arrival_time / self._ageing_seconds

    def requeue_key(self, request: RequestView, view: SchedulerView) -> object:
        return self.waiting_key(request, view)

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        return max(candidates, key=lambda one: (self.waiting_key(one, view), one.arrival_time, one.request_id))


def _make(options: PriorityOptions, context: PolicyContext) -> SchedulingPolicy:
    ageing = options.ageing_seconds
    if ageing is not None and not (0 < ageing < math.inf):
        raise ConfigError(
            f"scheduler.policy.ageing_seconds={ageing} is not valid: it must be a number of seconds above 0, or null "
            "for no ageing"
        )
    return PriorityPolicy(ageing)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[PriorityOptions]]:
    yield PolicyDescriptor(
        name="priority",
        api_version=(1, 6),
        summary="the most urgent first (lower value), with optional ageing",
        options_type=PriorityOptions,
        factory=_make,
    )
