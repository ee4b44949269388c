"""Stopwatch and Instrument: every second is counted once, and a part with timers behaves as one without."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.bench import timers
from tokenyard.bench.instrument import Instrument
from tokenyard.bench.timers import Stopwatch, seconds_per_call
from tokenyard.interfaces import RequestView, SchedulerView, SchedulingPolicy
from tokenyard.scheduler.policy_calls import overridden

Tree = list["Tree"]  # a call, and the calls inside it
TREES: st.SearchStrategy[Tree] = st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=4), max_leaves=20)


class CountingClock:
    """Each reading is one second after the last."""

    def __init__(self) -> None:
        self.seconds = 0

    def __call__(self) -> float:
        self.seconds += 1
        return float(self.seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> CountingClock:
    clock = CountingClock()
    monkeypatch.setattr(timers, "perf_counter", clock)
    return clock


def size(tree: Tree) -> int:
    return 1 + sum(size(inner) for inner in tree)


@given(tree=TREES)
def test_self_times_add_up_to_the_time_of_the_outermost_call(tree: Tree) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timers, "perf_counter", CountingClock())
        stopwatch = Stopwatch()
        depths: list[Callable[[Tree], None]] = []

        def call(inner: Tree, depth: int) -> None:
            for tree_inside in inner:
                visit(tree_inside, depth + 1)

        def visit(inner: Tree, depth: int) -> None:
            while len(depths) <= depth:
                at = len(depths)
                depths.append(stopwatch.timed(f"depth {at}", lambda below, at=at: call(below, at)))  # type: ignore[misc]
            depths[depth](inner)

        visit(tree, 0)
    tallies = stopwatch.tallies()
    # With this clock a call takes a second, and two more for each call anywhere inside it.
    assert sum(tally.self_seconds for tally in tallies.values()) == 2 * size(tree) - 1
    assert sum(tally.num_calls for tally in tallies.values()) == size(tree)


def test_what_a_call_raises_is_raised_and_counted(clock: CountingClock) -> None:
    stopwatch = Stopwatch()

    def fail() -> None:
        raise KeyError("lost")

    inner = stopwatch.timed("inner", fail)
    outer = stopwatch.timed("outer", lambda: inner())
    with pytest.raises(KeyError, match="lost"):
        outer()
    tallies = stopwatch.tallies()
    assert {label: (tally.self_seconds, tally.num_calls) for label, tally in tallies.items()} == {
        "inner": (1.0, 1),
        "outer": (2.0, 1),
    }


def test_clear_starts_the_count_again(clock: CountingClock) -> None:
    stopwatch = Stopwatch()
    timed = stopwatch.timed("x", lambda: None)
    timed()
    before = stopwatch.tallies()
    stopwatch.clear()
    timed()
    timed()
    assert (before["x"].num_calls, stopwatch.tallies()["x"].num_calls) == (1, 2)


def test_the_cost_of_a_timer_is_never_negative() -> None:
    assert seconds_per_call() >= 0


class ByLength(SchedulingPolicy):
    def waiting_key(self, request: RequestView, view: SchedulerView) -> int:
        return 7


def test_a_policy_with_timers_is_asked_what_it_overrides_and_nothing_else() -> None:
    request_view, scheduler_view = cast("RequestView", object()), cast("SchedulerView", object())
    policy, stopwatch = ByLength(), Stopwatch()
    decorated = Instrument(stopwatch).decorate(policy)
    assert decorated is policy
    assert overridden(policy) == {"waiting_key"}
    assert policy.waiting_key(request_view, scheduler_view) == 7
    assert policy.wake_at(scheduler_view) is None
    assert {label: tally.num_calls for label, tally in stopwatch.tallies().items()} == {"policy.waiting_key": 1}


def test_a_part_that_takes_no_timers_is_told_and_works_without(caplog: pytest.LogCaptureFixture) -> None:
    class Closed:
        __slots__ = ()

        def on_step(self) -> str:
            return "done"

    part, stopwatch = Closed(), Stopwatch()
    with caplog.at_level(logging.WARNING):
        Instrument(stopwatch).time_calls(part, "observer", ("on_step",))
    assert "Closed takes no timers" in caplog.text
    assert part.on_step() == "done"
    assert stopwatch.tallies()["observer.on_step"].num_calls == 0
