"""`scheduler=mlfq`: queues of growing quanta, joined as the prompt says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import SchedulingPolicy, check_positive, keep_turns

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView
    from tokenyard.request import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class MLFQOptions:
    """Options of the policy, under `scheduler.policy`."""

    levels: int = 6  # queues, each with twice the quantum of the one before
    quantum: int = 64  # tokens of the first level: of a prompt that joins it, and of output
    starve_seconds: float = 30.0  # waiting this long lifts a request by one level

    def __post_init__(self) -> None:
        check_positive(self, below=2**31)


class MLFQPolicy(SchedulingPolicy):
    """Skip-join multi-level feedback queue (FastServe, arXiv 2305.05920).

    A request joins the first level whose quantum holds its prompt, which is all that is charged for the prompt. Each
    output token then counts: a quantum that is used up makes it sink by one level; at the last one it stays. Lower
    levels displace higher ones. Within a level nobody is displaced, and the first to wait is the first to run.
    Waiting for `starve_seconds` lifts it by a level, with a new quantum; FastServe lifts to the first one at once. The
    line is sorted by when that makes a request one of the first level, which is the same order at any time.
    """

    def __init__(self, options: MLFQOptions, context: PolicyContext) -> None:
        self._options, self._limits, self._starve = options, context, options.starve_seconds
        self._joined: dict[str, tuple[int, int]] = {}  # output tokens and level with which it joined, or was lifted
        self._since: dict[str, float] = {}  # when it began to wait, of those that do

    def waiting_key(self, request: RequestView, view: SchedulerView) -> float:
        first = (-(-request.num_prompt_tokens // self._options.quantum) - 1).bit_length()
        self._joined.setdefault(request.request_id, (0, min(first, self._options.levels - 1)))
        since = self._since.setdefault(request.request_id, view.now)
        return since + self._starve * self._level(request, since)

    requeue_key = waiting_key

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        joined = np.array([self._joined[one.request_id] for one in running])
        quanta = (view.running_columns.num_output_tokens - joined[:, 0]) // self._options.quantum
        levels = np.minimum(self._options.levels, np.frexp(quanta + (1 << joined[:, 1]))[1]) - 1  # as in _level
        for row, one in enumerate(running):
            if one.request_id in self._since:
                levels[row] = self._level(one, view.now)
        kept = keep_turns(running, view, self._limits, lambda one: (self._level(one, view.now),), keys=levels)
        if len(kept) < len(running):
            stays = {one.request_id for one in kept}
            for one in running:
                if one.request_id not in stays:
                    self._since.setdefault(one.request_id, view.now)
        self.on_admit([one for one in kept if one.request_id in self._since], view)
        return kept

    def on_admit(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        for one in requests:
            level = self._level(one, view.now)
            if view.now - self._since.pop(one.request_id, view.now) >= self._starve:
                self._joined[one.request_id] = one.num_output_tokens, level

    def on_finish(self, requests: Sequence[RequestView], reasons: Sequence[FinishReason], view: SchedulerView) -> None:
        for one in requests:
            self._joined.pop(one.request_id, None)
            self._since.pop(one.request_id, None)

    def _level(self, one: RequestView, now: float) -> int:
        base, first = self._joined[one.request_id]
        quanta = (one.num_output_tokens - base) // self._options.quantum
        level = min(self._options.levels, (quanta + (1 << first)).bit_length()) - 1
        return max(0, level - int((now - self._since.get(one.request_id, now)) // self._starve))


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[MLFQOptions]]:
    what = "multi-level feedback queue with skip-join"
    yield PolicyDescriptor(name="mlfq", api_version=(1, 7), summary=what, options_type=MLFQOptions, factory=MLFQPolicy)
