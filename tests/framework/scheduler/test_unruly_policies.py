"""Policies that do what none should: the engine says which one it was, or goes on, and loses nothing."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import pytest
from tokenyard import PolicyDescriptor
from tokenyard.clock import Clock
from tokenyard.config import NoOptions
from tokenyard.errors import EngineDeadError, PluginError
from tokenyard.interfaces import RequestView, SchedulerView, SchedulingPolicy
from tokenyard.testing import EngineHarness, catalogue_with


def harness(kind: type[SchedulingPolicy], *overrides: str) -> EngineHarness:
    descriptor: PolicyDescriptor[NoOptions] = PolicyDescriptor(
        name="unruly", api_version=(1, 7), factory=lambda options, context: kind()
    )
    return EngineHarness(["scheduler=unruly", *overrides], catalogue=catalogue_with(descriptor))


def policy(**methods: Callable[..., object]) -> type[SchedulingPolicy]:
    return type("Unruly", (SchedulingPolicy,), methods)


def run_all(engine: EngineHarness, count: int = 6) -> None:
    for number in range(count):
        engine.add(range(number, number + 4), f"r{number}", max_tokens=3)
    engine.run()
    engine.check_idle()
    assert all(len(record.output_token_ids) == 3 for record in engine.requests.values())


# Keys


@pytest.mark.parametrize("nan", [math.nan, np.float32("nan"), (1, math.nan), ((math.nan,), 2)], ids=str)
def test_a_key_that_is_or_holds_no_number_is_refused_before_it_is_in_the_line(nan: object) -> None:
    engine = harness(policy(waiting_key=lambda self, request, view: nan if request.request_id == "bad" else 1.0))
    engine.add([1], "a", max_tokens=1)
    with pytest.raises(PluginError, match="not a number"):
        engine.add([1], "bad", max_tokens=1)
    engine.run()
    engine.check_idle()


class Shifting:
    """A key whose place changes after it was taken."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __lt__(self, other: Shifting) -> bool:
        self.number = -self.number
        return self.number < other.number


class Contradicting(Shifting):
    """Less than everything, and everything is less than it."""

    def __lt__(self, other: Shifting) -> bool:
        return True


@pytest.mark.parametrize("kind", [Shifting, Contradicting])
@pytest.mark.parametrize("by_client", [False, True])
def test_keys_without_an_order_make_some_order_and_lose_nobody(kind: type[Shifting], by_client: bool) -> None:
    engine = harness(
        type(
            "Unruly",
            (SchedulingPolicy,),
            {
                "waiting_key": lambda self, request, view: kind(len(request.request_id) + view.rng.randint(0, 9)),
                "waiting_order": lambda self, window, view: window,
                "window_by_client": by_client,
            },
        ),
        "scheduler.max_num_seqs=2",
    )
    run_all(engine, 12)


class Exploding:
    """A key that cannot be compared any more once it stands in the line."""

    is_armed = False

    def __lt__(self, other: Exploding) -> bool:
        if Exploding.is_armed:
            raise SystemExit(3)
        return False


def test_a_request_whose_key_cannot_be_compared_any_more_still_leaves_the_line() -> None:
    Exploding.is_armed = False
    engine = harness(policy(waiting_key=lambda self, request, view: Exploding()), "scheduler.max_num_seqs=1")
    for name in "abcd":
        engine.add([1, 2], name, max_tokens=2)
    Exploding.is_armed = True
    with pytest.raises(PluginError, match=r"cannot be compared.*SystemExit"):
        engine.add([1, 2], "e", max_tokens=2)
    engine.finish(["c"])
    engine.run()
    engine.check_idle()


# Lists that it was given


def cleared(self: object, given: list[RequestView], view: SchedulerView) -> Sequence[RequestView]:
    kept = list(given)
    given.clear()
    return kept


@pytest.mark.parametrize("point", ["waiting_order", "running_order"])
def test_a_policy_may_do_to_its_lists_what_it_likes(point: str) -> None:
    run_all(harness(policy(**{point: cleared}), "scheduler.max_num_seqs=2"))


def test_a_victim_that_was_popped_from_the_candidates_is_one_of_them() -> None:
    kind = policy(victim=lambda self, candidates, num_blocks, view: candidates.pop(0))
    with harness(kind, "kv_cache.num_blocks=3", "kv_cache.block_size=4") as engine:
        for name in "ab":
            engine.add([1, 2, 3], name, max_tokens=6)
        engine.run()
        assert engine.stats.num_preemptions


def test_lists_of_events_are_its_own() -> None:
    def on_finish(self: object, requests: list[RequestView], reasons: list[object], view: SchedulerView) -> None:
        requests.clear()

    engine = harness(policy(on_finish=on_finish))
    for name in "ab":
        engine.add([1], name, max_tokens=1)
    assert engine.finish(["a", "b"]) == ["a", "b"]
    engine.check_idle()


@pytest.mark.parametrize("point", ["waiting_order", "running_order"])
def test_requests_from_elsewhere_are_refused_by_name(point: str) -> None:
    def extended(self: object, given: list[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        given.extend(view.waiting(9))
        given.extend(view.running)
        return given

    engine = harness(policy(**{point: extended}), "scheduler.max_num_seqs=1")
    for name in "abc":
        engine.add([1, 2], name, max_tokens=3)
    with pytest.raises(
        EngineDeadError, match=f"policy unruly returned (one twice|others than it was given) from {point}"
    ):
        engine.run()


# Generators


def test_an_order_may_be_a_generator() -> None:
    def reversed_(self: object, window: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        yield from reversed(window)

    engine = harness(policy(waiting_order=reversed_), "scheduler.max_num_seqs=1")
    for name in "abc":
        engine.add([1, 2], name, max_tokens=1)
    engine.step()
    assert engine.scheduled == {"c": 2}
    engine.run()


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit(9)])
def test_what_a_generator_raises_names_the_policy(error: BaseException) -> None:
    def fails(self: object, window: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        yield from window
        raise error

    engine = harness(policy(waiting_order=fails))
    engine.add([1, 2], "a", max_tokens=1)
    with pytest.raises(EngineDeadError, match=f"policy unruly failed in waiting_order: {type(error).__name__}"):
        engine.step()


def test_a_generator_that_never_ends_is_cut_short() -> None:
    def endless(self: object, window: Sequence[RequestView], view: SchedulerView) -> Iterator[RequestView]:
        while True:
            yield from window

    engine = harness(policy(waiting_order=endless))
    engine.add([1, 2], "a", max_tokens=1)
    with pytest.raises(EngineDeadError, match="returned one twice"):
        engine.step()


# Values


@pytest.mark.parametrize("budget", [np.int64(3), np.float32(3.0), 3.7, 10**400])
def test_numbers_of_any_type_are_numbers(budget: object) -> None:
    run_all(harness(policy(token_budget=lambda self, view: budget)))


@pytest.mark.parametrize("moment", [10**400, np.float64(7.0), math.inf])
def test_times_of_any_type_are_times(moment: object) -> None:
    run_all(harness(policy(wake_at=lambda self, view: moment)))


class Unspeakable:
    def __repr__(self) -> str:
        raise RuntimeError("no words")


@pytest.mark.parametrize(
    "methods",
    [
        {"token_budget": lambda self, view: Unspeakable()},
        {"preempt_mode": lambda self, request, view: Unspeakable(), "running_order": lambda self, running, view: []},
    ],
    ids=["token_budget", "preempt_mode"],
)
def test_what_cannot_be_shown_is_told_by_its_type(methods: dict[str, Callable[..., object]]) -> None:
    engine = harness(policy(**methods), "scheduler.max_num_seqs=1")
    for name in "ab":
        engine.add([1, 2], name, max_tokens=3)
    with pytest.raises(EngineDeadError, match="policy unruly returned a Unspeakable that cannot be shown from"):
        engine.run()


def test_methods_that_nobody_would_call_are_refused_at_launch() -> None:
    async def on_step(self: object, outcomes: object, view: SchedulerView) -> None: ...

    class OnTheObject(SchedulingPolicy):
        def __init__(self) -> None:
            self.admit = lambda request, view: None  # type: ignore[method-assign, assignment, misc]

    with pytest.raises(PluginError, match="'on_step' is an async function"):
        harness(policy(on_step=on_step))
    with pytest.raises(PluginError, match="policy unruly sets admit on the object"):
        harness(OnTheObject)
    with pytest.raises(PluginError, match="window_by_client='no'"):
        harness(type("Unruly", (SchedulingPolicy,), {"window_by_client": "no"}))


# Time


class Ticking(Clock):
    """Moves a little at each look."""

    def __init__(self) -> None:
        self._now = 0.0

    def now(self) -> float:
        self._now += 0.001
        return self._now

    def wait(self, until: float | None = None, event: object = None) -> None:
        self._now = max(self._now, until or 0.0)


def test_a_time_that_comes_between_a_step_and_the_question_for_it_is_not_missed() -> None:
    from tokenyard.engine.driver import drive

    for start in range(30):
        opens_at = 0.001 * start
        kind = policy(
            waiting_order=lambda self, window, view, at=opens_at: list(window) if view.now >= at else [],
            wake_at=lambda self, view, at=opens_at: at if view.now < at else None,
        )
        descriptor: PolicyDescriptor[NoOptions] = PolicyDescriptor(
            name="unruly", api_version=(1, 7), factory=lambda options, context, kind=kind: kind()
        )
        clock = Ticking()
        engine = EngineHarness(["scheduler=unruly"], catalogue=catalogue_with(descriptor), clock=clock, checks=False)
        engine.add([1, 2], "a", max_tokens=2)
        drive(engine.core, clock, lambda outputs: None)
        assert not engine.has_requests
