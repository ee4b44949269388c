"""Calls of a scheduling policy: only of what it overrides, and with its name on whatever goes wrong."""

from __future__ import annotations

import difflib
import math
from typing import TYPE_CHECKING

from tokenyard.errors import PluginError, TokenyardError
from tokenyard.interfaces.policy import AdmitDecision, SchedulingPolicy

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.interfaces.policy import Preemption, StepOutcome
    from tokenyard.request import FinishReason
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.view import PolicyView

DECISION_POINTS = frozenset(
    {
        "admit",
        "waiting_key",
        "waiting_order",
        "running_order",
        "token_budget",
        "prefill_budget",
        "chunk_size",
        "victim",
        "preempt_mode",
        "requeue_key",
        "max_running",
        "wake_at",
    }
)
EVENTS = frozenset({"on_arrival", "on_admit", "on_step", "on_preempt", "on_finish"})


def overridden(policy: SchedulingPolicy) -> frozenset[str]:
    """Names of the points and events that the policy's class defines itself."""
    base, own = SchedulingPolicy, type(policy)
    return frozenset(name for name in DECISION_POINTS | EVENTS if vars_of(own, name) is not vars_of(base, name))


def vars_of(owner: type, name: str) -> object:
    """The attribute as the class holds it, without binding."""
    for base in owner.__mro__:
        if name in vars(base):
            return vars(base)[name]
    return None


def refuse_misspelt(policy: SchedulingPolicy) -> None:
    """Raise PluginError when a method is named almost like a point or event: it would never be called."""
    known = DECISION_POINTS | EVENTS
    for name in sorted(set(dir(type(policy))) - set(dir(SchedulingPolicy))):
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.88)
        if close and not name.startswith("_"):
            raise PluginError(
                f"policy {type(policy).__name__} has a method '{name}' that nobody calls; did you mean '{close[0]}'?"
            )


def refuse_unasked(policy: SchedulingPolicy, asked: frozenset[str], scheduler: str) -> None:
    """Raise PluginError when the policy decides something that this scheduler does not ask."""
    unasked = sorted((overridden(policy) & DECISION_POINTS) - asked)
    if unasked:
        raise PluginError(
            f"policy {type(policy).__name__} overrides {', '.join(unasked)}, which scheduler '{scheduler}' of this "
            f"version does not ask; it asks: {', '.join(sorted(asked))}"
        )


_ACCEPT = AdmitDecision.accept()


class PolicyCalls:
    """A policy as the scheduler asks it. What the policy does not override is answered here, without a call.

    What a policy raises becomes a PluginError that names it and the method, and a policy cannot end the process.
    """

    def __init__(self, policy: SchedulingPolicy, asked: frozenset[str], scheduler: str) -> None:
        refuse_misspelt(policy)
        refuse_unasked(policy, asked, scheduler)
        self._policy = policy
        self._own = overridden(policy)
        self.name = type(policy).__name__
        self.decides = bool(self._own & DECISION_POINTS)
        self.wants_steps = "on_step" in self._own
        self.can_refuse = "admit" in self._own
        self.has_requeue_key = "requeue_key" in self._own

    def use(self, view: PolicyView) -> None:
        """The view that every call is given; set once, when the scheduler is whole."""
        self._view = view

    def admit(self, request: Request) -> AdmitDecision:
        if not self.can_refuse:
            return _ACCEPT
        decision = self._ask("admit", request)
        if not isinstance(decision, AdmitDecision) or decision.kind not in ("accept", "reject", "defer"):
            raise PluginError(
                f"scheduling policy {self.name} returned {decision!r} from admit; it must be AdmitDecision.accept(), "
                ".reject(reason) or .defer(reason)"
            )
        return decision

    def waiting_key(self, request: Request) -> object:
        return self._ask("waiting_key", request) if "waiting_key" in self._own else ()

    def requeue_key(self, request: Request) -> object | None:
        return self._ask("requeue_key", request) if self.has_requeue_key else None

    def victim(self, candidates: Sequence[Request], num_blocks_needed: int) -> Request:
        if "victim" not in self._own:
            return candidates[-1]
        chosen = self._ask("victim", candidates, num_blocks_needed)
        for request in candidates:
            if request is chosen:
                return request
        raise PluginError(
            f"policy {self.name} chose {chosen!r} as victim, which is none of the {len(candidates)} candidates it was "
            "given"
        )

    def wake_at(self) -> float | None:
        if "wake_at" not in self._own:
            return None
        moment = self._ask("wake_at")
        if moment is None or moment == math.inf:
            return None
        if isinstance(moment, int | float) and not math.isnan(moment):
            return moment
        raise PluginError(
            f"scheduling policy {self.name} returned {moment!r} from wake_at; it must be a time on the engine's clock, "
            "in seconds, or None"
        )

    def on_arrival(self, requests: Sequence[Request]) -> None:
        self._tell("on_arrival", requests)

    def on_admit(self, requests: Sequence[Request]) -> None:
        self._tell("on_admit", requests)

    def on_step(self, outcomes: Sequence[StepOutcome]) -> None:
        self._tell("on_step", outcomes)

    def on_preempt(self, preemptions: Sequence[Preemption]) -> None:
        self._tell("on_preempt", preemptions)

    def on_finish(self, requests: Sequence[Request], reasons: Sequence[FinishReason]) -> None:
        self._tell("on_finish", requests, reasons)

    def _tell(self, event: str, rows: Sequence[object], *more: object) -> None:
        if rows and event in self._own:
            self._ask(event, rows, *more)

    def _ask(self, method: str, *arguments: object) -> object:
        try:
            return getattr(self._policy, method)(*arguments, self._view)
        except TokenyardError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"scheduling policy {self.name} failed in {method}: {type(error).__name__}: {error}"
            ) from error
