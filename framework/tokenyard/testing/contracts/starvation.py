"""Loads under which somebody might wait for ever: one request, and a stream of others that are all unlike it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from types import MappingProxyType
from typing import TYPE_CHECKING

from tokenyard.request import ServiceLevel
from tokenyard.testing.contracts.base import Shape

if TYPE_CHECKING:
    from tokenyard.testing.harness import EngineHarness

WAITER = "waiter"

_NUM_IN_LINE = 4  # of the others, at every moment
_CROWDED = Shape(max_num_seqs=2, max_num_batched_tokens=16, num_blocks=40)
_PRESSED = Shape(max_num_seqs=3, max_num_batched_tokens=16, num_blocks=10)  # 40 tokens: not even for two of the others


@dataclass(frozen=True, slots=True, kw_only=True)
class Traits:
    """What a request is like."""

    size: int = 8  # of its prompt
    max_tokens: int = 2
    priority: int = 0
    clients: tuple[str | None, ...] = (None,)  # in turn
    sessions: tuple[str | None, ...] = (None,)  # in turn
    service_level: ServiceLevel | None = None
    is_warm: bool = True  # it begins as the other warm ones do


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """Who waits, and who the others are."""

    waiter: Traits = field(default_factory=Traits)
    others: Traits = field(default_factory=Traits)
    num_served: int = 0  # requests like the waiter that were served before
    shape: Shape = _CROWDED


_LONG, _SHORT = 20, 2
_URGENT, _PATIENT = 0, 9
_CLIENTS = ("a", "b", "c")
_STRICT = ServiceLevel(ttft=0.5, tpot=0.1, e2e=5.0)

SCENARIOS: Mapping[str, Scenario] = MappingProxyType(
    {
        "long and urgent": Scenario(
            waiter=Traits(size=_LONG, priority=_URGENT), others=Traits(size=_SHORT, priority=_PATIENT)
        ),
        "long and patient": Scenario(
            waiter=Traits(size=_LONG, priority=_PATIENT), others=Traits(size=_SHORT, priority=_URGENT)
        ),
        "short and urgent": Scenario(
            waiter=Traits(size=_SHORT, priority=_URGENT), others=Traits(size=_LONG, priority=_PATIENT)
        ),
        "short and patient": Scenario(
            waiter=Traits(size=_SHORT, priority=_PATIENT), others=Traits(size=_LONG, priority=_URGENT)
        ),
        "a long output": Scenario(waiter=Traits(max_tokens=30)),
        "a short output": Scenario(waiter=Traits(max_tokens=1), others=Traits(max_tokens=12)),
        "of another client": Scenario(waiter=Traits(clients=("z",)), others=Traits(clients=_CLIENTS)),
        "of a client that had much": Scenario(
            waiter=Traits(clients=("z",), max_tokens=8), others=Traits(clients=_CLIENTS), num_served=12
        ),
        "of another session": Scenario(waiter=Traits(sessions=("z",)), others=Traits(sessions=_CLIENTS)),
        "of a session that had much": Scenario(
            waiter=Traits(sessions=("z",), max_tokens=8), others=Traits(sessions=_CLIENTS), num_served=12
        ),
        "of no session": Scenario(others=Traits(sessions=_CLIENTS)),
        "in no hurry": Scenario(others=Traits(service_level=_STRICT)),
        "in a hurry": Scenario(waiter=Traits(service_level=_STRICT)),
        "of nothing that is cached": Scenario(waiter=Traits(size=16, is_warm=False), others=Traits(size=16)),
        "of what is cached": Scenario(waiter=Traits(size=16), others=Traits(size=16, is_warm=False)),
        "where blocks are short": Scenario(
            waiter=Traits(size=4, max_tokens=24, clients=("z",)),
            others=Traits(size=4, max_tokens=24, clients=_CLIENTS),
            shape=_PRESSED,
        ),
    }
)


def steps_until_it_ends(
    harness: EngineHarness, scenario: Scenario, *, patience: int, seconds_per_step: float
) -> int | None:
    """Steps after which the waiter has ended, however; None = it has not, in as many as it may take."""
    numbers = count()
    for _ in range(scenario.num_served):
        _add(harness, scenario.waiter, next(numbers))
    harness.run()
    for _ in range(3):
        _add(harness, scenario.others, next(numbers))
    harness.step()
    _add(harness, scenario.waiter, next(numbers), WAITER)
    for num_steps in range(patience):
        if harness.request(WAITER).is_finished:
            return num_steps
        while harness.stats.num_waiting < _NUM_IN_LINE:
            _add(harness, scenario.others, next(numbers))
        harness.advance(seconds_per_step)
        harness.step()
    return None


def _add(harness: EngineHarness, traits: Traits, number: int, request_id: str | None = None) -> None:
    start = 500 if traits.is_warm else 10_000 + 100 * number
    harness.add(
        range(start, start + traits.size),
        request_id,
        priority=traits.priority,
        max_tokens=traits.max_tokens,
        client=traits.clients[number % len(traits.clients)],
        session=traits.sessions[number % len(traits.sessions)],
        service_level=traits.service_level,
    )
