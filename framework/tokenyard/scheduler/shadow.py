"""ShadowedCalls: a second policy, asked beside the one that acts. Its answers are counted, and never obeyed."""

from __future__ import annotations

import logging
from collections import deque
from functools import partial
from typing import TYPE_CHECKING, TypeVar, cast

from tokenyard.engine_outputs import ShadowDecision, ShadowPoint, ShadowStats
from tokenyard.scheduler.policy_calls import DECISION_POINTS, PolicyCalls, overridden, policy_calls, policy_timers
from tokenyard.scheduler.shadow_line import ShadowLine
from tokenyard.scheduler.shadow_view import ShadowView

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from contextlib import AbstractContextManager

    from tokenyard.interfaces.outcomes import StepOutcomes
    from tokenyard.interfaces.policy import (
        AdmitDecision,
        Preemption,
        PreemptMode,
        SchedulerView,
        SchedulingPolicy,
    )
    from tokenyard.interfaces.scheduler import SchedulerContext
    from tokenyard.request import FinishReason
    from tokenyard.scheduler.request_state import Request

logger = logging.getLogger(__name__)

ValueT = TypeVar("ValueT")

_MOST_KEPT = 64  # decisions until somebody takes them
_MOST_NAMED = 6  # requests of an order
_OF_THE_LINE = frozenset({"waiting_key", "waiting_order", "requeue_key"})


class ShadowedCalls(PolicyCalls):
    """Answers as the acting policy does, to the bit.

    The shadow is asked in the same states, with lists of its own and a view with random numbers of its own. What it
    raises switches it off, with one warning. Where the acting policy is overruled for a step, nothing is compared.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        asked: frozenset[str],
        scheduler: str,
        timers: Mapping[str, AbstractContextManager[None]] | None = None,
        name: str | None = None,
        *,
        shadow: Shadow,
    ) -> None:
        self._shadow = shadow
        super().__init__(policy, asked, scheduler, timers, name)
        shadow.compare_with(policy)
        self.wants_steps = self.wants_steps or shadow.calls.wants_steps

    def use(self, view: SchedulerView) -> None:
        super().use(view)
        self._shadow.use(view)

    def mute(self) -> None:
        super().mute()
        self._shadow.is_muted = True

    def unmute(self) -> None:
        super().unmute()
        self._shadow.is_muted = False

    def _set_asked(self, asked: frozenset[str]) -> None:
        super()._set_asked(asked)
        # Asking for a size that nobody limits changes nothing, and the shadow may.
        self.sizes_chunks = self.sizes_chunks or self._shadow.calls.sizes_chunks

    def shadow_stats(self) -> ShadowStats | None:
        return self._shadow.stats()

    def take_shadow_decisions(self) -> Sequence[ShadowDecision]:
        return self._shadow.take_decisions()

    # Decision points

    def begin_step(self) -> None:
        self._shadow.begin_step()

    def admit(self, request: Request) -> AdmitDecision:
        actual = super().admit(request)
        self._shadow.compare("admit", lambda calls: calls.admit(request).kind, actual.kind, request)
        return actual

    def waiting_key(self, request: Request) -> object:
        key = super().waiting_key(request)
        self._shadow.run(lambda calls: self._shadow.line.arrive(request))
        return key

    def requeue_key(self, request: Request) -> object | None:
        key = super().requeue_key(request)
        self._shadow.come_back(request, is_first=key is None)
        return key

    def running_order(self, running: Sequence[Request]) -> Sequence[Request]:
        chosen = super().running_order(running)
        self._shadow.compare_running(chosen)
        return chosen

    def token_budget(self, most: int) -> int:
        actual = super().token_budget(most)
        self._shadow.compare("token_budget", lambda calls: calls.token_budget(most), actual)
        return actual

    def prefill_budget(self, most: int) -> int:
        actual = super().prefill_budget(most)
        self._shadow.compare("prefill_budget", lambda calls: calls.prefill_budget(most), actual)
        return actual

    def max_running(self, most: int) -> int:
        actual = super().max_running(most)
        self._shadow.compare("max_running", lambda calls: calls.max_running(most), actual)
        self._shadow.run(lambda calls: self._shadow.line.begin_admission())
        return actual

    def chunk_size(self, request: Request, num_left: int) -> int:
        actual = num_left if "chunk_size" not in self._asked else super().chunk_size(request, num_left)
        self._shadow.compare("chunk_size", lambda calls: calls.chunk_size(request, num_left), actual, request)
        return actual

    def victim(self, candidates: Sequence[Request], num_blocks_needed: int) -> Request:
        own = list(candidates)
        actual = super().victim(candidates, num_blocks_needed)
        self._shadow.compare("victim", lambda calls: calls.victim(own, num_blocks_needed).request_id, actual.request_id)
        return actual

    def preempt_mode(self, request: Request, default: PreemptMode) -> PreemptMode:
        actual = super().preempt_mode(request, default)
        self._shadow.compare(
            "preempt_mode", lambda calls: calls.preempt_mode(request, default).value, actual.value, request
        )
        return actual

    def wake_at(self) -> float | None:
        actual = super().wake_at()
        self._shadow.compare("wake_at", lambda calls: calls.wake_at(), actual)
        return actual

    # Events

    def on_arrival(self, requests: Sequence[Request]) -> None:
        super().on_arrival(requests)
        self._shadow.run(lambda calls: calls.on_arrival(list(requests)))

    def on_admit(self, requests: Sequence[Request]) -> None:
        super().on_admit(requests)
        self._shadow.compare_entered(requests)
        self._shadow.run(lambda calls: calls.on_admit(list(requests)))

    def on_step(self, outcomes: StepOutcomes) -> None:
        super().on_step(outcomes)
        self._shadow.run(lambda calls: calls.on_step(outcomes))

    def on_preempt(self, preemptions: Sequence[Preemption]) -> None:
        super().on_preempt(preemptions)
        self._shadow.run(lambda calls: calls.on_preempt(list(preemptions)))

    def on_finish(self, requests: Sequence[Request], reasons: Sequence[FinishReason]) -> None:
        super().on_finish(requests, reasons)
        self._shadow.finish(requests, reasons)


class Shadow:
    """The policy that does not act, and how often it would have decided otherwise."""

    def __init__(self, policy: SchedulingPolicy, calls: PolicyCalls, name: str, seed: int) -> None:
        self.calls = calls
        self.line = ShadowLine(calls)
        self.is_muted = False
        self._name = name
        self._seed = seed
        self._is_on = True
        self._own = overridden(policy) & DECISION_POINTS
        self._compared = self._own  # points that one of the two overrides: elsewhere both say the default
        self._acting_orders = False  # whether the acting policy orders those that run
        self._view: SchedulerView | None = None
        self._running: list[str] | None = None  # ids in the shadow's order, for the step that is being made
        self._counts: dict[str, tuple[int, int]] = {}  # point -> agreed, otherwise
        self._decisions: deque[ShadowDecision] = deque(maxlen=_MOST_KEPT)

    def use(self, view: SchedulerView) -> None:
        """The acting policy's view."""
        self._view = view
        self.calls.use(ShadowView(view, self.line, self._seed))

    def compare_with(self, acting: SchedulingPolicy) -> None:
        """Whose answers it is compared with."""
        points = overridden(acting)
        self._compared = self._own | (points & DECISION_POINTS)
        self._acting_orders = "running_order" in points

    def stats(self) -> ShadowStats:
        """What was counted so far."""
        points = tuple(ShadowPoint(point, *counts) for point, counts in sorted(self._counts.items()))
        return ShadowStats(policy=self._name, points=points, is_on=self._is_on)

    def take_decisions(self) -> Sequence[ShadowDecision]:
        """The last ones in which it differed, each once."""
        if not self._decisions:
            return ()
        taken = tuple(self._decisions)
        self._decisions.clear()
        return taken

    def run(self, call: Callable[[PolicyCalls], ValueT]) -> ValueT | None:
        """Ask or tell it something; None where it is off, or fails."""
        if not self._is_on:
            return None
        try:
            return call(self.calls)
        except (Exception, SystemExit) as error:
            self._is_on = False
            logger.warning("the shadow policy '%s' is switched off: %s", self._name, error)
            return None

    def compare(
        self, point: str, ask: Callable[[PolicyCalls], object], actual: object, request: Request | None = None
    ) -> None:
        """Ask it, unless neither policy decides this."""
        if self._is_on and self._compares(point):
            answer = self.run(ask)
            self._count(point, actual, answer, request)

    def come_back(self, request: Request, *, is_first: bool) -> None:
        """A request was preempted; `is_first`: the acting policy puts it before everybody."""
        answer = self.run(lambda calls: self.line.come_back(request))
        if self._compares("requeue_key"):
            places = {True: "in front", False: "by its key"}
            self._count("requeue_key", places[is_first], places[bool(answer)], request)

    def begin_step(self) -> None:
        """Ask whose turn it is before anything of the step is done."""
        self._running = None
        if not self._compares("running_order") or self._view is None or not (running := self._view.running):
            return
        self._running = self.run(lambda calls: _ids(calls.running_order(cast("list[Request]", list(running)))))
        if not self._acting_orders:
            self._count_running([request.request_id for request in running])

    def compare_running(self, chosen: Sequence[Request]) -> None:
        """The acting policy's order."""
        if self._compares("running_order"):
            self._count_running(_ids(chosen))

    def compare_entered(self, requests: Sequence[Request]) -> None:
        """These entered the batch, one after the other."""
        for request in requests:
            expected = self.run(partial(self._enter, request))
            if not self.is_muted and self._compared & _OF_THE_LINE:
                name = "nobody" if expected is None else expected.request_id
                self._count("waiting_order", request.request_id, name)

    def _enter(self, request: Request, calls: PolicyCalls) -> Request | None:
        return self.line.enter(request)

    def _leave(self, request: Request, calls: PolicyCalls) -> None:
        self.line.leave(request)

    def finish(self, requests: Sequence[Request], reasons: Sequence[FinishReason]) -> None:
        """These ended."""
        for request in requests:
            self.run(partial(self._leave, request))
        self.run(lambda calls: calls.on_finish(list(requests), list(reasons)))

    def _compares(self, point: str) -> bool:
        return point in self._compared and not self.is_muted

    def _count_running(self, actual: list[str]) -> None:
        order, self._running = self._running, None
        if order is not None:
            self._count("running_order", actual, order)

    def _count(self, point: str, actual: object, answer: object, request: Request | None = None) -> None:
        if not self._is_on:
            return
        agreed, otherwise = self._counts.get(point, (0, 0))
        if actual == answer:
            self._counts[point] = agreed + 1, otherwise
            return
        self._counts[point] = agreed, otherwise + 1
        request_id = None if request is None else request.request_id
        self._decisions.append(ShadowDecision(point, request_id, _shown(actual), _shown(answer)))


def _ids(requests: Sequence[Request]) -> list[str]:
    return [request.request_id for request in requests]


def _shown(answer: object) -> str:
    if not isinstance(answer, list):
        return str(answer)
    more = f", ... {len(answer)} in all" if len(answer) > _MOST_NAMED else ""
    return ", ".join(answer[:_MOST_NAMED]) + more


def shadowed_calls(context: SchedulerContext, asked: frozenset[str], scheduler: str) -> PolicyCalls:
    """The calls of a scheduler's policy, beside which its shadow is asked where it has one. Raises PluginError."""
    policy = context.shadow
    if policy is None:
        return policy_calls(context, asked, scheduler)
    name = context.config.shadow or type(policy).__name__
    calls = PolicyCalls(policy, asked, scheduler, policy_timers(context.plugin_times, policy, "shadow", name), name)
    shadow = Shadow(policy, calls, name, context.seed)
    return policy_calls(context, asked, scheduler, make=partial(ShadowedCalls, shadow=shadow))
