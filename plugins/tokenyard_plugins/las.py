"""`scheduler=las`: the requests that have attained the least service run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import PreemptMode, SchedulingPolicy, keep_turns

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, Preemption, RequestView, SchedulerView
    from tokenyard.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class LASOptions:
    """Options of the policy, under `scheduler.policy`."""

    quantum: int = 64  # tokens: service is compared in multiples of it, so that equals do not take turns at each step

    def __post_init__(self) -> None:
        if self.quantum < 1:
            raise ValueError(f"quantum={self.quantum} is not valid: it must be a number of tokens, at least 1")


class LASPolicy(SchedulingPolicy):
    """Least attained service, also called foreground-background (Kleinrock 1976; for LLMs the base of FastServe).

    Service = tokens of prompt and output that the request has got; those computed again count once. It knows no
    lengths: what has run for long is likely to run for longer where lengths have a heavy tail. A request that comes
    displaces the one served most; each then has its turn until it is a `quantum` ahead. Where to displace loses K/V, it
    waits for a token of each turn, so that every one gets a request further. Long ones starve under a steady load.
    """

    may_starve = True

    def __init__(self, options: LASOptions, context: PolicyContext) -> None:
        self._quantum, self._limits = options.quantum, context
        self._is_free = context.preempt_mode is PreemptMode.PAUSE  # to displace
        self._outputs: dict[str, int] = {}  # of live requests, when they last entered the batch
        self._lost: dict[str, int] = {}  # tokens that were computed of those that lost a place

    def waiting_key(self, request: RequestView, view: SchedulerView) -> int:
        return self._key(request)[0]

    requeue_key = waiting_key

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        columns = view.running_columns
        keys = (columns.num_prompt_tokens + columns.num_output_tokens) // self._quantum
        for row in (columns.num_output_tokens == 0).nonzero()[0].tolist():
            keys[row] = self._key(running[row])[0]
        return keep_turns(running, view, self._limits, self._key, may_lose=self._may_lose, keys=keys)

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        return max(candidates, key=lambda one: (self._key(one), one.arrival_time, one.request_id))

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        for request in requests:
            self._outputs[request.request_id] = request.num_output_tokens

    def on_preempt(self, preemptions: Sequence[Preemption], view: SchedulerView) -> None:
        for request, num_lost, _ in preemptions:
            had = max(num_lost, view.hit_tokens(request))  # swapped out, nothing is lost
            self._lost[request.request_id] = max(had, self._lost.get(request.request_id, 0))

    def on_finish(self, requests: Sequence[RequestView], reasons: Sequence[FinishReason], view: SchedulerView) -> None:
        for request in requests:
            self._outputs.pop(request.request_id, None)
            self._lost.pop(request.request_id, None)

    def _key(self, request: RequestView) -> tuple[int]:
        if request.num_output_tokens:
            return ((request.num_prompt_tokens + request.num_output_tokens) // self._quantum,)
        return (max(request.num_computed_tokens, self._lost.get(request.request_id, 0)) // self._quantum,)

    def _may_lose(self, request: RequestView) -> bool:
        return self._is_free or request.num_output_tokens > self._outputs[request.request_id]


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[LASOptions]]:
    what = "least attained service first, displacing what has had more"
    yield PolicyDescriptor(name="las", api_version=(1, 7), summary=what, options_type=LASOptions, factory=LASPolicy)
