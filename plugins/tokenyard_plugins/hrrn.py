"""`scheduler=hrrn`: the highest response ratio next, with time counted in tokens."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import SchedulingPolicy

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView


@dataclass(frozen=True, slots=True, kw_only=True)
class HRRNOptions:
    """Options of the policy, under `scheduler.policy`."""

    window: int = 128  # of more waiting requests than that the order is that of arrival

    def __post_init__(self) -> None:
        if self.window < 1:
            raise ValueError(f"window={self.window} is not valid: it must be a number of requests, at least 1")


class HRRNPolicy(SchedulingPolicy):
    """Highest response ratio next (Brinch Hansen 1971) in the form of SGLang, for prefills.

    Ratio = tokens that the engine has computed since the request came / its tokens that no cache has. Short requests go
    early and long ones gain as they wait, so nobody starves, and it needs neither a clock nor predictions. Inputs: the
    token clock, the prompt, the prefix cache. A preempted request keeps its place in the order.
    """

    def __init__(self, options: HRRNOptions, context: PolicyContext) -> None:
        self.waiting_window = options.window

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        if view.num_waiting > self.waiting_window:
            return window
        clock = view.token_clock

        def rank(request: RequestView) -> tuple[float, float, str]:
            known = request.num_prompt_tokens + request.num_output_tokens
            uncached = known - view.hit_tokens(request)  # at least 1: the last token is always computed
            return -(clock - request.arrival_tokens) / uncached, request.arrival_time, request.request_id

        return sorted(window, key=rank)

    def requeue_key(self, request: RequestView, view: SchedulerView) -> object:
        return self.waiting_key(request, view)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[HRRNOptions]]:
    yield PolicyDescriptor(
        name="hrrn",
        api_version=(1, 7),
        summary="highest ratio of waiting, in tokens, to uncached tokens first",
        options_type=HRRNOptions,
        factory=HRRNPolicy,
    )
