"""`scheduler=priority`: the most urgent request first, optionally with ageing."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import SchedulingPolicy, keep_turns

if TYPE_CHECKING:
    from tokenyard.arrays import FloatArray, LongArray
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView


@dataclass(frozen=True, slots=True, kw_only=True)
class PriorityOptions:
    """Options of the policy, under `scheduler.policy`."""

    ageing_seconds: float | None = None  # waiting this long counts as one level of priority; None = no ageing
    preempt: bool = False  # whether a more urgent request displaces a less urgent one that runs

    def __post_init__(self) -> None:
        if self.ageing_seconds is not None and not 0 < self.ageing_seconds < math.inf:
            raise ValueError(
                f"ageing_seconds={self.ageing_seconds} is not valid: it must be a number of seconds above 0, or null "
                "for no ageing"
            )


class PriorityPolicy(SchedulingPolicy):
    """Lower value = more urgent; ties go by arrival, then id. The priority is the client's own.

    It orders the line and picks whom to preempt when blocks are short: the least urgent request, the latest among
    equals. A running request is stopped to make room in a full batch only by `DisplacingPriorityPolicy`. A preempted
    request keeps its place in the order. Without ageing, a steady stream of urgent requests starves the others.
    """

    def __init__(self, options: PriorityOptions, context: PolicyContext) -> None:
        # The effective priority at time t is priority - (t - arrival) / ageing. Between any two requests t cancels,
        # so the key never changes and a sorted line serves.
        self._ageing_seconds, self._limits = options.ageing_seconds, context
        self.may_starve = options.ageing_seconds is None

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return self._key(request)

    def requeue_key(self, request: RequestView, view: SchedulerView) -> object:
        return self._key(request)

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        return max(candidates, key=lambda one: (self._key(one), one.arrival_time, one.request_id))

    def _key(self, request: RequestView) -> tuple[float]:
        if self._ageing_seconds is None:
            return (request.priority,)
        return (request.priority + request.arrival_time / self._ageing_seconds,)


class DisplacingPriorityPolicy(PriorityPolicy):
    """`preempt=true`: who is more urgent displaces the least urgent running request. Equals displace nobody.

    A class of its own, since a policy that asks for the order of what runs is asked in each step.
    """

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        columns = view.running_columns
        keys: LongArray | FloatArray = columns.priority
        if self._ageing_seconds is not None:
            keys = keys + columns.arrival_time / self._ageing_seconds
        return keep_turns(running, view, self._limits, self._key, keys=keys)


def _make(options: PriorityOptions, context: PolicyContext) -> SchedulingPolicy:
    return (DisplacingPriorityPolicy if options.preempt else PriorityPolicy)(options, context)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[PriorityOptions]]:
    yield PolicyDescriptor(
        name="priority",
        api_version=(1, 7),
        summary="the most urgent first (lower value), with optional ageing",
        options_type=PriorityOptions,
        factory=_make,
    )
