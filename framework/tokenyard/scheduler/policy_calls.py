"""Calls of a scheduling policy: only of what it overrides, and with its name on whatever goes wrong."""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from numbers import Integral, Real
from typing import TYPE_CHECKING, Literal

from tokenyard.errors import PluginError, TokenyardError
from tokenyard.interfaces.policy import AdmitDecision, PreemptMode, SchedulingPolicy
from tokenyard.scheduler.plugin_words import shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenyard.engine_outputs import ShadowDecision, ShadowStats
    from tokenyard.interfaces.outcomes import StepOutcomes
    from tokenyard.interfaces.policy import Preemption, SchedulerView
    from tokenyard.interfaces.scheduler import SchedulerContext
    from tokenyard.plugin_times import PluginTimes
    from tokenyard.request import FinishReason
    from tokenyard.scheduler.request_state import Request
    from tokenyard.stopwatch import Timer

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


def refuse_misspelt(policy: SchedulingPolicy, who: str) -> None:
    """Raise PluginError when a method is named almost like a point or event: it would never be called."""
    known = DECISION_POINTS | EVENTS
    for name in sorted(set(dir(type(policy))) - set(dir(SchedulingPolicy))):
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.88)
        if close and not name.startswith("_"):
            raise PluginError(f"policy {who} has a method '{name}' that nobody calls; did you mean '{close[0]}'?")


def refuse_uncalled(policy: SchedulingPolicy, who: str) -> None:
    """Raise PluginError for methods that would not do what they look like: coroutines, and functions of an object."""
    for name in sorted(overridden(policy)):
        if inspect.iscoroutinefunction(getattr(policy, name)):
            raise PluginError(f"policy {who}: '{name}' is an async function, which nobody awaits; it must be plain")
    own = sorted((DECISION_POINTS | EVENTS) & set(getattr(policy, "__dict__", ())) - overridden(policy))
    if own:
        raise PluginError(
            f"policy {who} sets {', '.join(own)} on the object, where nobody looks; define a method of the class"
        )


def refuse_unasked(policy: SchedulingPolicy, who: str, asked: frozenset[str], scheduler: str) -> None:
    """Raise PluginError when the policy decides something that this scheduler does not ask."""
    unasked = sorted((overridden(policy) & DECISION_POINTS) - asked)
    if unasked:
        raise PluginError(
            f"policy {who} overrides {', '.join(unasked)}, which scheduler '{scheduler}' of this "
            f"version does not ask; it asks: {', '.join(sorted(asked))}"
        )


_ACCEPT = AdmitDecision.accept()
_UNTIMED: AbstractContextManager[None] = nullcontext()
_NEVER = 1e18  # seconds; a time that far away is none
_HOLDING = frozenset({"waiting_order", "running_order", "token_budget", "prefill_budget", "chunk_size", "max_running"})
"""Points by which a policy may keep a step from running what could run."""


class PolicyCalls:
    """A policy as the scheduler asks it. What the policy does not override is answered here, without a call.

    It is given lists of its own, so what it does to them changes nothing. What it raises becomes a PluginError that
    names it and the method, and it cannot end the process.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        asked: frozenset[str],
        scheduler: str,
        timers: Mapping[str, AbstractContextManager[None]] | None = None,
        name: str | None = None,
    ) -> None:
        self.name = who = name or type(policy).__name__  # as messages call it: by what the user chose, if anything
        refuse_misspelt(policy, who)
        refuse_uncalled(policy, who)
        refuse_unasked(policy, who, asked, scheduler)
        self._policy = policy
        self._own = overridden(policy)
        self._timers = dict.fromkeys(self._own, _UNTIMED) | dict(timers or {})
        self.decides = bool(self._own & DECISION_POINTS)
        self.wants_steps = "on_step" in self._own
        self.can_hold = bool(self._own & _HOLDING)
        self.waiting_window = _checked_window(policy, who)
        self.window_by_client = _checked_by_client(policy, who) and "waiting_order" in self._own
        self.unmute()

    def use(self, view: SchedulerView) -> None:
        """The view that every call is given; set once, when the scheduler is whole."""
        self._view = view

    def mute(self) -> None:
        """Until `unmute` the step is made as if the policy held nothing back."""
        self._set_asked(self._own - _HOLDING)

    def unmute(self) -> None:
        """Ask everything that the policy overrides."""
        self._set_asked(self._own)

    def _set_asked(self, asked: frozenset[str]) -> None:
        self._asked = asked
        self.orders_waiting = "waiting_order" in asked
        self.orders_running = "running_order" in asked
        self.sizes_chunks = "chunk_size" in asked

    # Decision points

    def begin_step(self) -> None:
        """A step is about to be made."""

    def admit(self, request: Request) -> AdmitDecision:
        if "admit" not in self._asked:
            return _ACCEPT
        decision = self._ask("admit", request)
        if not isinstance(decision, AdmitDecision) or decision.kind not in ("accept", "reject", "defer"):
            raise self._wrong("admit", decision, "AdmitDecision.accept(), .reject(reason) or .defer(reason)")
        if decision.reason is None or isinstance(decision.reason, str):
            return decision
        return AdmitDecision(decision.kind, shown(decision.reason, as_text=True))

    def waiting_key(self, request: Request) -> object:
        return self._ask("waiting_key", request) if "waiting_key" in self._asked else ()

    def requeue_key(self, request: Request) -> object | None:
        return self._ask("requeue_key", request) if "requeue_key" in self._asked else None

    def waiting_order(self, window: Sequence[Request]) -> Sequence[Request]:
        return self._order("waiting_order", window)

    def running_order(self, running: Sequence[Request]) -> Sequence[Request]:
        return self._order("running_order", running)

    def token_budget(self, most: int) -> int:
        return self._limit("token_budget", most)

    def prefill_budget(self, most: int) -> int:
        return self._limit("prefill_budget", most)

    def max_running(self, most: int) -> int:
        return self._limit("max_running", most)

    def chunk_size(self, request: Request, num_left: int) -> int:
        if not self.sizes_chunks:
            return num_left
        size = self._ask("chunk_size", request, num_left)
        if not isinstance(size, Integral) or not 0 <= int(size) <= num_left:
            raise self._wrong("chunk_size", size, f"a number of tokens from 0 to {num_left}")
        return int(size)

    def victim(self, candidates: Sequence[Request], num_blocks_needed: int) -> Request:
        if "victim" not in self._asked:
            return candidates[-1]
        chosen = self._ask("victim", list(candidates), num_blocks_needed)
        for request in candidates:
            if request is chosen:
                return request
        raise PluginError(
            f"policy {self.name} chose {shown(chosen)} as victim, which is none of the {len(candidates)} candidates it "
            "was given"
        )

    def preempt_mode(self, request: Request, default: PreemptMode) -> PreemptMode:
        if "preempt_mode" not in self._asked:
            return default
        mode = self._ask("preempt_mode", request)
        if mode is None:
            return default
        try:
            return PreemptMode(mode)
        except (Exception, SystemExit):
            allowed = ", ".join(f"PreemptMode.{one.name}" for one in PreemptMode)
            raise self._wrong("preempt_mode", mode, f"{allowed} or None") from None

    def wake_at(self) -> float | None:
        if "wake_at" not in self._asked:
            return None
        moment = self._ask("wake_at")
        if moment is None:
            return None
        number = _as_float(moment)
        if number == number:
            return number if number < _NEVER else None
        raise self._wrong("wake_at", moment, "a time on the engine's clock, in seconds, or None")

    # A shadow, in the class that has one

    def shadow_stats(self) -> ShadowStats | None:
        """How often a policy that does not act would have decided otherwise."""
        return None

    def take_shadow_decisions(self) -> Sequence[ShadowDecision]:
        """Where it would have, since the last call."""
        return ()

    # Events

    def on_arrival(self, requests: Sequence[Request]) -> None:
        self._tell("on_arrival", list(requests))

    def on_admit(self, requests: Sequence[Request]) -> None:
        self._tell("on_admit", list(requests))

    def on_step(self, outcomes: StepOutcomes) -> None:
        self._tell("on_step", outcomes)

    def on_preempt(self, preemptions: Sequence[Preemption]) -> None:
        self._tell("on_preempt", list(preemptions))

    def on_finish(self, requests: Sequence[Request], reasons: Sequence[FinishReason]) -> None:
        self._tell("on_finish", list(requests), list(reasons))

    # Calls

    def _order(self, method: str, given: Sequence[Request]) -> Sequence[Request]:
        """The policy's order, of requests that it was given, each at most once."""
        if method not in self._asked:
            return given
        chosen = self._taken(method, self._ask(method, list(given)), len(given))
        if chosen == given:  # the same requests in the same order, as is mostly so: one look at each
            return given
        ids = {id(request) for request in chosen}
        if len(ids) != len(chosen) or not ids <= {id(request) for request in given}:
            strange = "one twice" if len(ids) != len(chosen) else "others than it was given"
            raise PluginError(
                f"scheduling policy {self.name} returned {strange} from {method}; it must return requests that it was "
                "given, each at most once"
            )
        return chosen

    def _taken(self, method: str, order: object, most: int) -> list[Request]:
        """The items of what a policy returned, which may be a generator: its code runs here."""
        if not isinstance(order, Iterable):
            raise self._wrong(method, order, "a sequence of the requests that it was given")
        try:
            return list(islice(order, most + 1))
        except TokenyardError:
            raise
        except (Exception, SystemExit) as error:
            raise self._failed(method, error) from error

    def _limit(self, method: str, most: int) -> int:
        """A number from 0 to `most`; None and whatever is more are `most`."""
        if method not in self._asked:
            return most
        limit = self._ask(method)
        if limit is None:
            return most
        number = _as_float(limit)
        if not number >= 0:  # a number that is none is not >= 0 either
            raise self._wrong(method, limit, "a number, 0 or more, or None")
        return int(min(number, most))

    def _wrong(self, method: str, returned: object, allowed: str) -> PluginError:
        return PluginError(
            f"scheduling policy {self.name} returned {shown(returned)} from {method}; it must be {allowed}"
        )

    def _failed(self, method: str, error: BaseException) -> PluginError:
        why = f"{type(error).__name__}: {shown(error, as_text=True)}"
        return PluginError(f"scheduling policy {self.name} failed in {method}: {why}")

    def _tell(self, event: str, rows: Sequence[object], *more: object) -> None:
        if rows and event in self._asked:
            self._ask(event, rows, *more)

    def _ask(self, method: str, *arguments: object) -> object:
        try:
            with self._timers[method]:
                return getattr(self._policy, method)(*arguments, self._view)
        except TokenyardError:
            raise
        except (Exception, SystemExit) as error:
            raise self._failed(method, error) from error


def policy_calls(
    context: SchedulerContext, asked: frozenset[str], scheduler: str, make: Callable[..., PolicyCalls] = PolicyCalls
) -> PolicyCalls:
    """The calls of a scheduler's policy. Raises PluginError when it cannot be asked: see `refuse_unasked`."""
    policy, chosen = context.policy or SchedulingPolicy(), context.config.policy
    name = type(policy).__name__ if chosen is None else chosen.name
    return make(policy, asked, scheduler, policy_timers(context.plugin_times, policy, "policy", name), name)


def policy_timers(
    times: PluginTimes | None, policy: SchedulingPolicy, kind: Literal["policy", "shadow"], name: str
) -> Mapping[str, Timer]:
    """Timers for what the policy overrides, if somebody asks for times; `name` is the one that it is chosen by."""
    return {} if times is None else {point: times.timer(kind, name, point) for point in sorted(overridden(policy))}


def _as_float(value: object) -> float:
    """A number of any type, plain or numpy's; nan for what is none."""
    if not isinstance(value, Real):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return -math.inf if str(value).startswith("-") else math.inf


def _checked_by_client(policy: SchedulingPolicy, who: str) -> bool:
    if not isinstance(policy.window_by_client, bool):
        raise PluginError(
            f"scheduling policy {who} has window_by_client={shown(policy.window_by_client)}; it must be True or False"
        )
    return policy.window_by_client


def _checked_window(policy: SchedulingPolicy, who: str) -> int:
    window = policy.waiting_window
    if not isinstance(window, int) or isinstance(window, bool) or window < 1:
        raise PluginError(
            f"scheduling policy {who} has waiting_window={window!r}; it must be a number of requests, 1 or more"
        )
    return window
