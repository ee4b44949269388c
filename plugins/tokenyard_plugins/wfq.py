"""`scheduler=wfq`: weighted fair queueing of clients, by virtual finish times."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import SchedulingPolicy, check_positive

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView
    from tokenyard.request import FinishReason

_MOST_CLIENTS = 10_000  # beyond, clients are forgotten whose requests all start now, each time there are twice as many


@dataclass(frozen=True, slots=True, kw_only=True)
class WFQOptions:
    """Options of the policy, under `scheduler.policy`."""

    input_weight: float = 1.0  # service that a prompt token counts as
    output_weight: float = 2.0  # service that an output token counts as
    weights: Mapping[str, float] = field(default_factory=dict)  # client -> its share, relative to the others'
    default_weight: float = 1.0  # of clients that are not named

    def __post_init__(self) -> None:
        check_positive(self)


class WFQPolicy(SchedulingPolicy):
    """Self-clocked fair queueing (Golestani, INFOCOM 1994; for LLM requests vLLM #31909).

    A request's virtual finish time is that of its client's request before it, or the virtual time now if that is later,
    plus its service / the client's weight; the smallest is next. Virtual time is the latest finish time of those
    admitted. The key never changes, so the line costs what that of `fcfs` does. A request's service is `input_weight` *
    prompt + `output_weight` * output as `scheduler.predictor` has it; what an ended one turns out to have taken more,
    or less, its client's later requests are charged, or given back: they may pass earlier ones.
    """

    def __init__(self, options: WFQOptions, context: PolicyContext) -> None:
        self._options = options
        self._time, self._most = 0.0, _MOST_CLIENTS
        self._finish: dict[str | None, float] = {}  # client -> virtual finish time of its last request
        self._keys: dict[str, tuple[float, float]] = {}  # request id -> virtual finish time, and predicted cost

    def waiting_key(self, request: RequestView, view: SchedulerView) -> float:
        cost = self._cost(request, request.num_prompt_tokens, view.predictor.output_len(request))
        finish = max(self._time, self._finish.get(request.client_id, 0.0)) + cost
        self._finish[request.client_id] = finish
        self._keys[request.request_id] = finish, cost
        return finish

    def requeue_key(self, request: RequestView, view: SchedulerView) -> float:
        return self._keys[request.request_id][0]

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        self._time = max(self._time, *(self._keys[one.request_id][0] for one in requests))
        if len(self._finish) > self._most:
            self._finish = {client: finish for client, finish in self._finish.items() if finish > self._time}
            self._most = max(_MOST_CLIENTS, 2 * len(self._finish))

    def on_finish(self, requests: Sequence[RequestView], reasons: Sequence[FinishReason], view: SchedulerView) -> None:
        for one in requests:
            _, predicted = self._keys.pop(one.request_id, (0.0, 0.0))
            actual = self._cost(one, one.num_prompt_tokens if one.attained_service else 0, one.num_output_tokens)
            self._finish[one.client_id] = self._finish.get(one.client_id, self._time) + actual - predicted

    def _cost(self, request: RequestView, num_prompt_tokens: int, num_output_tokens: float) -> float:
        service = self._options.input_weight * num_prompt_tokens + self._options.output_weight * num_output_tokens
        return service / self._options.weights.get(request.client_id or "", self._options.default_weight)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[WFQOptions]]:
    yield PolicyDescriptor(
        name="wfq",
        api_version=(1, 7),
        summary="weighted fair queueing of clients by virtual finish times",
        options_type=WFQOptions,
        factory=WFQPolicy,
    )
