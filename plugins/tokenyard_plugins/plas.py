"""`scheduler=plas`: the sessions that have attained the least service run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import SchedulingPolicy, check_positive, keep_turns

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView, StepOutcomes
    from tokenyard.request import FinishReason

_MOST_SESSIONS = 10_000  # beyond, those are forgotten that were served last the longest ago


@dataclass(frozen=True, slots=True, kw_only=True)
class PLASOptions:
    """Options of the policy, under `scheduler.policy`."""

    levels: int = 8  # queues, each for twice the service of all before it
    quantum: int = 512  # tokens of service of the first level
    ageing_seconds: float = 60.0  # being there this long counts as one level

    def __post_init__(self) -> None:
        check_positive(self, below=2**31)


class PLASPolicy(SchedulingPolicy):
    """Program-level attained service (PLAS of Autellix, arXiv 2502.13965).

    Service = tokens computed for all requests of a client's session (`session_id`), ended ones too; without one a
    request is its own. Less than `quantum` is the first level, less than twice as much the next, and so on. A request
    waits at the level that its session has when it comes; while it runs its level grows with the session's. Lower
    levels displace higher ones, and being there `ageing_seconds` longer makes up for a level, so that nobody starves.
    """

    def __init__(self, options: PLASOptions, context: PolicyContext) -> None:
        self._options, self._limits = options, context
        self._service: dict[tuple[str | None, str], int] = {}  # by client and session; served last = last
        self._queued: dict[str, float] = {}  # keys of those that wait, as they stand in line

    def waiting_key(self, request: RequestView, view: SchedulerView) -> float:
        key = self._queued[request.request_id] = self._key(request)[0]
        return key

    requeue_key = waiting_key

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        columns = view.running_columns
        service = columns.attained_service.copy()
        for row, one in enumerate(running):
            if one.session_id is not None:
                service[row] = self._service.get((one.client_id, one.session_id), 0)
        levels = np.minimum(self._options.levels - 1, np.frexp(service // self._options.quantum)[1])
        keys = levels + columns.arrival_time / self._options.ageing_seconds
        return keep_turns(running, view, self._limits, self._key, keys=keys)

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        for request in requests:
            self._queued.pop(request.request_id, None)

    def on_step(self, outcomes: StepOutcomes, view: SchedulerView) -> None:
        for session, num_tokens in outcomes.sum_by_session(outcomes.num_computed_tokens).items():
            self._service[session] = self._service.pop(session, 0) + num_tokens
        while len(self._service) > _MOST_SESSIONS:
            del self._service[next(iter(self._service))]

    def on_finish(self, requests: Sequence[RequestView], reasons: Sequence[FinishReason], view: SchedulerView) -> None:
        self.on_admit(requests, view)

    def _key(self, request: RequestView) -> tuple[float]:
        if (queued := self._queued.get(request.request_id)) is not None:
            return (queued,)
        client, session = request.client_id, request.session_id
        service = request.attained_service if session is None else self._service.get((client, session), 0)
        level = min(self._options.levels - 1, (service // self._options.quantum).bit_length())
        return (level + request.arrival_time / self._options.ageing_seconds,)


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[PLASOptions]]:
    what = "least attained service of the whole session first, displacing what has had more"
    yield PolicyDescriptor(name="plas", api_version=(1, 7), summary=what, options_type=PLASOptions, factory=PLASPolicy)
