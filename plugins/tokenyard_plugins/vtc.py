"""`scheduler=vtc` and `scheduler=weighted-vtc`: the client that was served least is next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import ClientCounters, SchedulingPolicy, check_positive

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, Preemption, RequestView, SchedulerView, StepOutcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class VTCOptions:
    """Options of both names, under `scheduler.policy`. Without `weights` all clients have equal shares."""

    input_weight: float = 1.0  # service that a prompt token counts as
    output_weight: float = 2.0  # service that an output token counts as
    weights: Mapping[str, float] = field(default_factory=dict)  # client -> its share, relative to the others'
    default_weight: float = 1.0  # of clients that are not named
    window: int = 1024  # requests in line, of as many clients where there are, of which the next is chosen

    def __post_init__(self) -> None:
        check_positive(self)


class VTCPolicy(SchedulingPolicy):
    """Virtual token counter (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024).

    A client's counter grows by `input_weight` a prompt token when a request of its is admitted for the first time, and
    by `output_weight` an output token, divided by the client's weight. The client with the smallest counter is next; of
    its requests the first that came. A client that has nothing in line gathers no credit: when it comes back, its
    counter is lifted to the smallest in line, or while nobody waits to that of the client who was admitted last.
    Requests without a client id are one client together.

    Fair among the first `window` clients in line, in the order of their first requests; of more clients than that, the
    others are not looked at before they are among these.
    """

    window_by_client = True

    def __init__(self, options: VTCOptions, context: PolicyContext) -> None:
        self._options, self.waiting_window = options, options.window
        self._counters = ClientCounters()
        self._last: str | None = None  # the client who was admitted last

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        if len(view.num_waiting_by_client) == 1:
            return window
        counters: dict[str | None, float] = {}  # as they will be when those before are in
        turns: list[tuple[float, float, str, RequestView]] = []
        for one in window:
            turn = counters.setdefault(one.client_id, self._counters[one.client_id])
            turns.append((turn, one.arrival_time, one.request_id, one))
            counters[one.client_id] = turn + self._prompt_cost(one)
        return [one for *_, one in sorted(turns)]

    def on_arrival(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        waiting = view.num_waiting_by_client
        if joining := {one.client_id for one in requests if one.client_id not in waiting}:
            self._counters.floor = self._counters.smallest(waiting, self._last)
            self._counters.join(joining, waiting)
            self._counters.queue(joining)

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        for one in requests:
            self._last = one.client_id
            self._counters[one.client_id] += self._prompt_cost(one)

    def on_step(self, outcomes: StepOutcomes, view: SchedulerView) -> None:
        for client, num_tokens in outcomes.sum_by_client(outcomes.num_new_tokens).items():
            self._counters[client] += self._cost(client, self._options.output_weight * num_tokens)

    def on_preempt(self, preemptions: Sequence[Preemption], view: SchedulerView) -> None:
        self._counters.queue(one.request.client_id for one in preemptions)

    def _prompt_cost(self, one: RequestView) -> float:
        service = 0 if one.attained_service else self._options.input_weight * one.num_prompt_tokens
        return self._cost(one.client_id, service)

    def _cost(self, client: str | None, service: float) -> float:
        return service / self._options.weights.get(client or "", self._options.default_weight)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[VTCOptions]]:
    for name, what in (("vtc", "the client served least is next"), ("weighted-vtc", "vtc with weights of clients")):
        yield PolicyDescriptor(name=name, api_version=(1, 7), summary=what, options_type=VTCOptions, factory=VTCPolicy)
