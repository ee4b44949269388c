"""`scheduler=dlpm`: the longest cached prefix first, among the clients that have not had their part of this round."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import ClientCounters, SchedulingPolicy, check_positive

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView, StepOutcomes


@dataclass(frozen=True, slots=True, kw_only=True)
class DLPMOptions:
    """Options of the policy, under `scheduler.policy`."""

    quantum: float = 4096.0  # service of each client in a round
    input_weight: float = 1.0  # service that a prompt token counts as which was not cached
    output_weight: float = 2.0  # service that an output token counts as
    window: int = 1024  # requests in line, of as many clients where there are, of which the next is chosen
    patience: float = 16.0  # computed tokens, of all requests, that waiting for one more cached token is worth

    def __post_init__(self) -> None:
        check_positive(self)


class DLPMPolicy(SchedulingPolicy):
    """Deficit longest prefix match (Cao et al., Locality-aware Fair Scheduling in LLM Serving, arXiv 2501.14312).

    Each client may have `quantum` service in a round: `input_weight` a prompt token that was not cached, counted when
    its request is admitted for the first time, and `output_weight` an output token. The clients with something left go
    first, among them who has the longest cached prefix, as in `lpm`; when nobody in line has, the next round begins,
    for all. What a client had too much is owed, what it left while it had nothing in line is lost. Requests without a
    client id are one client together.

    That holds among the first `window` clients in line, in the order of their first requests; of more clients than that
    the others are not looked at before they are among these, and rounds begin without them.
    """

    window_by_client = True

    def __init__(self, options: DLPMOptions, context: PolicyContext) -> None:
        self._options, self.waiting_window = options, options.window
        self._used = ClientCounters()  # its floor is what each client was granted, in all rounds

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        ranks = {one.request_id: one.arrival_tokens - self._options.patience * view.hit_tokens(one) for one in window}
        order = sorted(window, key=lambda one: (ranks[one.request_id], one.arrival_time, one.request_id))
        used: dict[str | None, float] = {}  # as it will be when those before are in
        rounds: dict[str, float] = {}  # request id -> from now, 0 = this one
        for one in order:
            so_far = used.setdefault(one.client_id, self._used[one.client_id]) - self._used.floor
            rounds[one.request_id] = max(0, so_far // self._options.quantum + 1)
            used[one.client_id] += self._prompt_service(one, view.hit_tokens(one))
        self._used.floor += self._options.quantum * min(rounds.values())
        return sorted(order, key=lambda one: rounds[one.request_id])

    def on_arrival(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        waiting = view.num_waiting_by_client
        self._used.join({one.client_id for one in requests if one.client_id not in waiting}, waiting)

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        for one in requests:
            self._used[one.client_id] += self._prompt_service(one, one.num_computed_tokens)

    def on_step(self, outcomes: StepOutcomes, view: SchedulerView) -> None:
        for client, num_tokens in outcomes.sum_by_client(outcomes.num_new_tokens).items():
            self._used[client] += self._options.output_weight * num_tokens

    def _prompt_service(self, request: RequestView, num_cached: int) -> float:
        return self._options.input_weight * (0 if request.attained_service else request.num_prompt_tokens - num_cached)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[DLPMOptions]]:
    yield PolicyDescriptor(
        name="dlpm",
        api_version=(1, 7),
        summary="the longest cached prefix first, among the clients with something left of their quantum",
        options_type=DLPMOptions,
        factory=DLPMPolicy,
    )
