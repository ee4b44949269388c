"""Stopwatch: every second is counted once, however calls lie in each other."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.stopwatch import Stopwatch

Tree = list["Tree"]  # a call, and the calls inside it
Call = Callable[[Tree], None]
TREES: st.SearchStrategy[Tree] = st.recursive(st.just([]), lambda inner: st.lists(inner, max_size=4), max_leaves=20)


class CountingTimer:
    """Each reading is one second after the last."""

    def __init__(self) -> None:
        self.seconds = 0

    def __call__(self) -> float:
        self.seconds += 1
        return float(self.seconds)


def size(tree: Tree) -> int:
    return 1 + sum(size(inner) for inner in tree)


def entered(stopwatch: Stopwatch[str], label: str, call: Call) -> Call:
    """The same as `timed`, with a timer that is entered."""
    timer = stopwatch.timer(label)

    def entering(inner: Tree) -> None:
        with timer:
            call(inner)

    return entering


@given(tree=TREES, kinds=st.lists(st.booleans(), min_size=8, max_size=8))
def test_self_times_add_up_to_the_time_of_the_outermost_call(tree: Tree, kinds: list[bool]) -> None:
    stopwatch = Stopwatch[str](CountingTimer())
    depths: list[Call] = []

    def call(inner: Tree, depth: int) -> None:
        for tree_inside in inner:
            visit(tree_inside, depth + 1)

    def visit(inner: Tree, depth: int) -> None:
        while len(depths) <= depth:
            at, is_timed = len(depths), kinds[len(depths) % len(kinds)]
            label, function = f"depth {at}", lambda below, at=at: call(below, at)
            depths.append(stopwatch.timed(label, function) if is_timed else entered(stopwatch, label, function))
        depths[depth](inner)

    visit(tree, 0)
    tallies = stopwatch.tallies()
    # With this timer a call takes a second, and two more for each call anywhere inside it.
    assert sum(tally.self_seconds for tally in tallies.values()) == 2 * size(tree) - 1
    assert sum(tally.num_calls for tally in tallies.values()) == size(tree)


@pytest.mark.parametrize("is_timed", [True, False])
def test_what_a_call_raises_is_raised_and_counted(is_timed: bool) -> None:
    stopwatch = Stopwatch[str](CountingTimer())

    def fail(tree: Tree) -> None:
        raise KeyError("lost")

    inner = stopwatch.timed("inner", fail) if is_timed else entered(stopwatch, "inner", fail)
    outer = stopwatch.timed("outer", lambda: inner([]))
    with pytest.raises(KeyError, match="lost"):
        outer()
    tallies = stopwatch.tallies()
    assert {label: (tally.self_seconds, tally.num_calls) for label, tally in tallies.items()} == {
        "inner": (1.0, 1),
        "outer": (2.0, 1),
    }


def test_two_timers_of_one_label_count_together() -> None:
    stopwatch = Stopwatch[str](CountingTimer())
    for timer in (stopwatch.timer("x"), stopwatch.timer("x")):
        with timer:
            pass
    assert stopwatch.tallies()["x"].num_calls == 2


def test_clear_starts_the_count_again() -> None:
    stopwatch = Stopwatch[str](CountingTimer())
    timed = stopwatch.timed("x", lambda: None)
    timed()
    before = stopwatch.tallies()
    stopwatch.clear()
    timed()
    timed()
    assert (before["x"].num_calls, stopwatch.tallies()["x"].num_calls) == (1, 2)
