"""Which decision points and events a policy really overrides: what it does not override is never called."""

from __future__ import annotations

import difflib

from tokenyard.errors import PluginError
from tokenyard.interfaces.policy import SchedulingPolicy

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
