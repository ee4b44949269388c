"""Calls of a policy, seen from outside: what a harness or a suite notes of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from numbers import Real
from typing import TYPE_CHECKING, TypeAlias, cast

from tokenyard.scheduler.policy_calls import overridden

if TYPE_CHECKING:
    from tokenyard.interfaces.policy import RequestView, SchedulerView, SchedulingPolicy

_MOST = 2**62

Around: TypeAlias = Callable[[str, Callable[..., object], Sequence[object]], object]
"""Given a method's name, the method and its arguments, it calls it and returns what the caller is told."""


def surround(policy: SchedulingPolicy, around: Around, names: Iterable[str] | None = None) -> None:
    """From now on calls of points and events that `policy` overrides go through `around`; None = all of them."""
    base = type(policy)
    wanted = overridden(policy) if names is None else overridden(policy) & frozenset(names)
    if not wanted:
        return

    def surrounded(name: str) -> Callable[..., object]:
        def call(self: SchedulingPolicy, *arguments: object) -> object:
            return around(name, getattr(super(own, self), name), arguments)

        return call

    methods = {name: surrounded(name) for name in wanted}
    own = type(base.__name__, (base,), {**methods, "__slots__": (), "__module__": base.__module__})
    policy.__class__ = own


class PolicyAnswers:
    """What a policy said last of how much may run, and who first."""

    _LIMITS = ("token_budget", "prefill_budget", "max_running")

    def __init__(self, policy: SchedulingPolicy | None) -> None:
        self._limits: dict[str, float] = {}
        self._order: list[str] = []
        if policy is not None:
            surround(policy, self._note, (*self._LIMITS, "waiting_order"))

    def limit(self, name: str, most: int) -> int:
        """What it said of that, at most `most`; that number where it said nothing."""
        return int(max(0, min(self._limits.get(name, most), most)))

    @property
    def order(self) -> Sequence[str]:
        """Ids in the order in which they may enter; empty where it orders nothing."""
        return self._order

    def _note(self, name: str, method: Callable[..., object], arguments: Sequence[object]) -> object:
        if name == "waiting_order" and _is_first_window(*arguments):
            self._order = []
        answer = method(*arguments)
        if name == "waiting_order":
            most = len(cast("Sequence[RequestView]", arguments[0])) + 1  # more is judged as well, and may never end
            order = list(islice(answer, most)) if isinstance(answer, Iterable) else []
            self._order.extend(getattr(request, "request_id", "") for request in order)
            return order if isinstance(answer, Iterable) else answer  # the scheduler judges what it is
        if isinstance(answer, Real):
            self._limits[name] = float(answer) if answer < _MOST else _MOST
        else:
            self._limits.pop(name, None)
        return answer


def _is_first_window(window: object, view: object) -> bool:
    """Whether it begins with the first in line: a step's first question."""
    line = cast("SchedulerView", view).waiting(1)
    return bool(line) and cast("Sequence[RequestView]", window)[0] is line[0]
