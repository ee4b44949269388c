"""Each decision point, asked as its docstring says, with numbers worked out by hand."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence

import pytest
from planted_swapping import StandsStill, manager
from tokenyard import KVCacheManagerDescriptor, PolicyDescriptor
from tokenyard.config import NoOptions
from tokenyard.errors import EngineDeadError, PluginError
from tokenyard.interfaces import (
    AdmitDecision,
    Preemption,
    PreemptMode,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    StepOutcome,
)
from tokenyard.testing import EngineHarness, catalogue_with


def harness(
    policy: SchedulingPolicy, *overrides: str, others: Sequence[KVCacheManagerDescriptor[NoOptions]] = ()
) -> EngineHarness:
    descriptor: PolicyDescriptor[NoOptions] = PolicyDescriptor(
        name="probe", api_version=(1, 7), factory=lambda options, context: policy
    )
    return EngineHarness(["scheduler=probe", *overrides], catalogue=catalogue_with(descriptor, *others))


def ids(requests: Sequence[RequestView]) -> list[str]:
    return [request.request_id for request in requests]


# The line


class ShortestNow(SchedulingPolicy):
    """Re-ranks the window by prompt length."""

    waiting_window = 3

    def __init__(self) -> None:
        self.windows: list[list[str]] = []

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        self.windows.append(ids(window))
        return sorted(window, key=lambda one: one.num_prompt_tokens)


def test_a_dynamic_order_ranks_the_first_requests_in_line_and_no_others() -> None:
    policy = ShortestNow()
    with harness(policy, "scheduler.max_num_seqs=2") as engine:
        for name, length in (("a", 30), ("b", 20), ("c", 10), ("d", 5)):
            engine.add(range(length), name, max_tokens=1)
        engine.step()
        assert policy.windows == [["a", "b", "c"]]
        assert list(engine.scheduled) == ["c", "b"]
        engine.run()
    assert policy.windows[1:] == [["a", "d"]]


def test_a_window_that_is_used_up_is_followed_by_the_next_one() -> None:
    policy = ShortestNow()
    with harness(policy) as engine:
        for number in range(7):
            engine.add(range(10 - number), f"r{number}", max_tokens=1)
        engine.step()
        assert policy.windows == [["r0", "r1", "r2"], ["r3", "r4", "r5"], ["r6"]]
        assert list(engine.scheduled) == ["r2", "r1", "r0", "r5", "r4", "r3", "r6"]


def test_nobody_is_asked_for_an_order_in_a_step_in_which_nobody_may_enter() -> None:
    policy = ShortestNow()
    with harness(policy, "scheduler.max_num_seqs=1") as engine:
        engine.add(range(4), "a", max_tokens=5)
        engine.add(range(4), "b", max_tokens=1)
        engine.step()
        policy.windows.clear()
        for _ in range(3):
            engine.step()
        assert policy.windows == []


class LeavesOut(SchedulingPolicy):
    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return [request for request in window if request.priority == 0]


def test_who_is_left_out_of_the_order_waits_with_a_reason_and_keeps_its_place(caplog: pytest.LogCaptureFixture) -> None:
    with harness(LeavesOut()) as engine:
        engine.add([1, 2], "held", priority=1, max_tokens=1)
        engine.add([1, 2], "free", max_tokens=2)
        engine.step()
        (row,) = engine.scheduler.snapshot().waiting
        assert (engine.running, row.request_id, row.wait_reason) == (["free"], "held", "deferred")
        assert row.wait_detail == "the policy left it out of its order"
        with caplog.at_level(logging.WARNING):
            engine.run()  # at the end nobody else is there: the step is made without the policy
    assert sum("left everything out of a step" in record.message for record in caplog.records) == 1


# Turns


class Turns(SchedulingPolicy):
    """Lets those run whose ids are named, in that order."""

    def __init__(self, mode: PreemptMode | None = None) -> None:
        self.named: list[str] | None = None
        self.mode = mode
        self.preemptions: list[Preemption] = []
        self.outcomes: list[StepOutcome] = []

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        if self.named is None:
            return running
        by_id = {request.request_id: request for request in running}
        return [by_id[name] for name in self.named if name in by_id]

    def preempt_mode(self, request: RequestView, view: SchedulerView) -> PreemptMode | None:
        return self.mode

    def on_preempt(self, preemptions: Sequence[Preemption], view: SchedulerView) -> None:
        self.preemptions += preemptions

    def on_step(self, outcomes: Sequence[StepOutcome], view: SchedulerView) -> None:
        self.outcomes += outcomes


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_a_paused_request_keeps_its_blocks_and_leaves_its_place_to_another(loop: str) -> None:
    policy = Turns(PreemptMode.PAUSE)
    with harness(policy, "scheduler.max_num_seqs=1", f"engine={loop}") as engine:
        engine.add(range(20), "a", max_tokens=6)
        engine.add(range(100, 130), "b", max_tokens=3)
        engine.step()
        engine.step()
        assert engine.running == ["a"]
        blocks, policy.named = engine.blocks("a"), ["b"]
        engine.step()
        engine.step()
        assert engine.running == ["a", "b"]
        assert list(engine.scheduled) == ["b"]
        assert engine.blocks("a") == blocks
        assert (engine.stats.num_running, engine.stats.num_paused, engine.stats.num_preemptions) == (2, 1, 1)
        (preemption,) = policy.preemptions
        assert (preemption.num_lost_tokens, preemption.mode) == (0, PreemptMode.PAUSE)
        assert preemption.request.is_paused
        policy.named = ["b", "a"]
        engine.run()
        assert [len(engine.request(name).output_token_ids) for name in "ab"] == [6, 3]
    service = {
        name: sum(one.num_computed_tokens for one in policy.outcomes if one.request.request_id == name) for name in "ab"
    }
    assert service == {"a": 25, "b": 32}  # nothing was computed twice


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_a_displaced_request_goes_back_into_the_line_and_is_computed_again(loop: str) -> None:
    policy = Turns()
    with harness(
        policy, "scheduler.max_num_seqs=1", f"engine={loop}", "kv_cache.enable_prefix_caching=false"
    ) as engine:
        engine.add(range(20), "a", max_tokens=6)
        engine.add(range(100, 130), "b", max_tokens=3)
        engine.step()
        engine.step()
        num_computed = engine.scheduler.snapshot().running[0].num_computed_tokens
        policy.named = ["b"]
        engine.step()
        engine.step()
        assert (engine.running, engine.waiting) == (["b"], ["a"])
        (preemption,) = policy.preemptions
        assert (preemption.num_lost_tokens, preemption.mode) == (num_computed, PreemptMode.RECOMPUTE)
        policy.named = None
        engine.run()
        assert [len(engine.request(name).output_token_ids) for name in "ab"] == [6, 3]


def test_the_config_says_what_happens_where_the_policy_does_not() -> None:
    policy = Turns()
    with harness(policy, "scheduler.max_num_seqs=1", "scheduler.preempt_mode=pause") as engine:
        engine.add(range(20), "a", max_tokens=6)
        engine.add(range(100, 130), "b", max_tokens=3)
        engine.step()
        policy.named = ["b"]
        engine.step()
        assert [preemption.mode for preemption in policy.preemptions] == [PreemptMode.PAUSE]
        policy.named = None
        engine.run()


def test_blocks_of_paused_requests_are_taken_for_one_that_enters() -> None:
    policy = Turns(PreemptMode.PAUSE)
    with harness(policy, "scheduler.max_num_seqs=1", "kv_cache.num_blocks=4") as engine:
        engine.add(range(40), "a", max_tokens=6)  # 3 of 4 blocks
        engine.add(range(100, 130), "b", max_tokens=3)  # 2 blocks
        engine.step()
        policy.named = ["b"]
        engine.step()
        assert (engine.running, engine.waiting) == (["b"], ["a"])
        assert [one.mode for one in policy.preemptions] == [PreemptMode.PAUSE, PreemptMode.RECOMPUTE]
        policy.named = None
        engine.run()
        engine.check_idle()


def test_nobody_loses_blocks_for_one_that_would_not_fit_even_then() -> None:
    policy = Turns(PreemptMode.PAUSE)
    with harness(policy, "scheduler.max_num_seqs=2", "kv_cache.num_blocks=6") as engine:
        engine.add(range(40), "a", max_tokens=6)  # 3 blocks
        engine.add(range(100, 130), "b", max_tokens=8)  # 2 blocks
        engine.step()
        engine.add(range(200, 280), "c", max_tokens=3)  # 5 blocks
        policy.named = ["b"]
        engine.step()
        assert (engine.running, engine.waiting) == (["a", "b"], ["c"])
        assert [one.mode for one in policy.preemptions] == [PreemptMode.PAUSE]
        policy.named = None
        engine.run()


@pytest.mark.parametrize("num_prompt", [64, 65])
def test_a_paused_request_gives_its_blocks_to_one_that_they_are_just_enough_for(num_prompt: int) -> None:
    """Of six blocks `b` runs with two and `a` is paused with three: four of 16 tokens can be had."""
    policy = Turns(PreemptMode.PAUSE)
    with harness(policy, "scheduler.max_num_seqs=2", "kv_cache.num_blocks=6") as engine:
        engine.add(range(40), "a", max_tokens=6)
        engine.add(range(100, 117), "b", max_tokens=8)
        engine.step()
        engine.add(range(200, 200 + num_prompt), "c", max_tokens=1)
        policy.named = ["b"]
        engine.step()
        assert ("c" in engine.scheduled) is (num_prompt == 64)
        assert [one.mode for one in policy.preemptions][1:] == [PreemptMode.RECOMPUTE] * (num_prompt == 64)
        policy.named = None
        engine.run()


@pytest.mark.parametrize("num_prompt", [64, 65])
def test_what_a_paused_request_shares_with_the_one_that_enters_counts_once(num_prompt: int) -> None:
    """Two of `a`'s three blocks are its hit: they are free only once `a` has lost them, and then needed."""
    policy = Turns(PreemptMode.PAUSE)
    with harness(policy, "scheduler.max_num_seqs=2", "kv_cache.num_blocks=6") as engine:
        engine.add(range(40), "a", max_tokens=6)
        engine.add(range(100, 117), "b", max_tokens=8)
        engine.step()
        engine.add([*range(32), *range(200, 200 + num_prompt - 32)], "c", max_tokens=1)
        policy.named = ["b"]
        engine.step()
        assert ("c" in engine.scheduled) is (num_prompt == 64)
        assert [one.mode for one in policy.preemptions][1:] == [PreemptMode.RECOMPUTE] * (num_prompt == 64)
        policy.named = None
        engine.run()


class TurnsInOrder(Turns):
    """Ranks the line too: as it is."""

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return window


@pytest.mark.parametrize("policy_type", [Turns, TurnsInOrder])
def test_who_was_displaced_does_not_enter_again_in_that_step(policy_type: type[Turns]) -> None:
    policy = policy_type(PreemptMode.RECOMPUTE)
    with harness(policy, "scheduler.max_num_seqs=2", "engine=sync") as engine:
        for number, name in enumerate("abc"):
            engine.add([number, 5], name, max_tokens=9)
        engine.step()
        policy.named = ["b"]
        engine.step()
        assert (list(engine.scheduled), engine.waiting) == (["b", "c"], ["a"])  # though `a` is first in line
        policy.named = None
        engine.run()


def test_a_policy_that_lets_nobody_run_is_overruled() -> None:
    policy = Turns(PreemptMode.PAUSE)
    policy.named = []
    with harness(policy) as engine:
        engine.add(range(20), "a", max_tokens=3)
        assert engine.run() == 3


class Sleeper(Turns):
    """Lets nobody run until five seconds are over, and says so."""

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return running if view.now >= 5 else []

    def wake_at(self, view: SchedulerView) -> float | None:
        return 5.0


def test_a_policy_that_names_a_time_may_let_the_engine_rest_until_then() -> None:
    with harness(Sleeper(PreemptMode.PAUSE)) as engine:
        engine.add(range(20), "a", max_tokens=3)
        engine.step()  # it enters
        assert not engine.step().did_run
        engine.run()
        assert engine.clock.now() == 5.0


def test_more_than_may_run_are_cut_off_behind() -> None:
    policy = Turns(PreemptMode.PAUSE)
    with harness(policy, "scheduler.max_num_seqs=1") as engine:
        engine.add(range(20), "a", max_tokens=6)
        engine.add(range(100, 130), "b", max_tokens=6)
        engine.step()
        policy.named = ["b"]
        engine.step()
        policy.named = ["a", "b"]
        engine.step()
        assert list(engine.scheduled) == ["a"]
        policy.named = ["b", "a"]
        engine.step()
        assert list(engine.scheduled) == ["b"]
        engine.run()


# Budgets


class Budgets(SchedulingPolicy):
    def __init__(self, *, total: int | None = None, prefill: int | None = None, running: int | None = None) -> None:
        self.total, self.prefill, self.running = total, prefill, running

    def token_budget(self, view: SchedulerView) -> int | None:
        return self.total

    def prefill_budget(self, view: SchedulerView) -> int | None:
        return self.prefill

    def max_running(self, view: SchedulerView) -> int | None:
        return self.running


def test_a_token_budget_is_what_decodes_leave_for_prefills_and_holds_no_decode_back() -> None:
    policy = Budgets()
    with harness(policy) as engine:
        for name in "abc":
            engine.add(range(10), name, max_tokens=9)
        engine.step()
        engine.add(range(50), "long", max_tokens=1)
        policy.total = 8
        engine.step()
        assert engine.scheduled == {"a": 1, "b": 1, "c": 1, "long": 5}
        policy.total = 2
        engine.step()
        assert engine.scheduled == {"a": 1, "b": 1, "c": 1}
        policy.total = 10**9  # at most the configured ones
        engine.step()
        assert engine.scheduled == {"a": 1, "b": 1, "c": 1, "long": 45}


def test_a_prefill_budget_is_shared_by_running_and_new_prefills() -> None:
    policy = Budgets(prefill=6)
    with harness(policy) as engine:
        engine.add(range(10), "a", max_tokens=2)
        engine.add(range(10), "b", max_tokens=2)
        engine.step()
        assert engine.scheduled == {"a": 6}
        engine.step()
        assert engine.scheduled == {"a": 4, "b": 2}
        engine.step()
        assert engine.scheduled == {"a": 1, "b": 6}


def test_a_cap_on_running_requests_lets_nobody_enter_and_stops_nobody() -> None:
    policy = Budgets(running=2)
    with harness(policy) as engine:
        for name in "abc":
            engine.add(range(4), name, max_tokens=4)
        engine.step()
        assert (engine.running, engine.stats.wait_reason) == (["a", "b"], "max_num_seqs")
        policy.running = 1
        engine.step()
        assert list(engine.scheduled) == ["a", "b"]
        policy.running = 0  # with nobody running that would stop the engine
        engine.run()


class Chunks(SchedulingPolicy):
    def __init__(self, size: Callable[[str, int], int]) -> None:
        self.size = size
        self.asked: list[tuple[str, int]] = []

    def chunk_size(self, request: RequestView, num_left: int, view: SchedulerView) -> int:
        self.asked.append((request.request_id, num_left))
        return self.size(request.request_id, num_left)


def test_the_policy_cuts_the_chunks_of_running_and_new_prefills() -> None:
    policy = Chunks(lambda name, left: min(left, 4))
    with harness(policy, "scheduler.max_num_batched_tokens=7", "scheduler.max_num_seqs=4") as engine:
        engine.add(range(10), "a", max_tokens=2)
        engine.add(range(5), "b", max_tokens=2)
        engine.step()
        assert engine.scheduled == {"a": 4, "b": 3}
        assert policy.asked == [("a", 7), ("b", 3)]
        engine.run()


def test_a_prefill_that_gets_nothing_lets_others_pass() -> None:
    policy = Chunks(lambda name, left: 0 if name == "a" else left)
    with harness(policy) as engine:
        engine.add(range(10), "a", max_tokens=1)
        engine.add(range(5), "b", max_tokens=2)
        engine.step()
        assert engine.scheduled == {"b": 5}
        assert engine.scheduler.snapshot().waiting[0].wait_detail == "the policy gave it no tokens"
        engine.run()


def test_a_prompt_that_must_be_computed_whole_is_not_cut() -> None:
    policy = Chunks(lambda name, left: 1)
    with harness(policy, "scheduler.enable_chunked_prefill=false", "model.max_model_len=64") as engine:
        engine.add(range(10), "a", max_tokens=1)
        engine.step()
        assert engine.scheduled == {"a": 10}
    assert policy.asked == []


# What a policy may see


class Looks(SchedulingPolicy):
    def __init__(self) -> None:
        self.seen: list[object] = []

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        self.seen.append((request.request_id, request.arrival_tokens, view.token_clock, view.hit_tokens(request)))
        return 0


def test_the_token_clock_runs_with_the_work_and_hits_are_those_of_now() -> None:
    policy = Looks()
    with harness(policy) as engine:
        engine.add(range(40), "a", max_tokens=2)
        engine.run()
        engine.add(range(40), "b", max_tokens=1)
        engine.run()
        engine.add([7] * 40, "c", max_tokens=1)
    assert policy.seen == [("a", 0, 0, 0), ("b", 41, 41, 32), ("c", 49, 49, 0)]


class AsksAgain(SchedulingPolicy):
    """Looks up what it is told to, whenever it may, and by name what it kept."""

    def __init__(self) -> None:
        self.kept: list[RequestView] = []
        self.hits: list[int] = []

    def on_arrival(self, requests: Sequence[RequestView], view: SchedulerView) -> None:
        self.kept += requests
        self.hits = [view.hit_tokens(one) for one in self.kept]

    def on_step(self, outcomes: Sequence[StepOutcome], view: SchedulerView) -> None:
        self.hits = [view.hit_tokens(one) for one in self.kept]


def test_a_request_that_knows_a_token_more_is_looked_up_again() -> None:
    """One token is always left to compute: of 32 known ones one block of two is a hit, of 33 both.

    The cache says that nothing changes, so nothing else than the number of tokens tells.
    """
    policy = AsksAgain()
    with harness(policy, "engine=sync", "kv_cache=planted", others=[manager(StandsStill)]) as engine:
        engine.add(range(100, 140), "first", max_tokens=1)
        engine.run()
        policy.kept.clear()
        engine.add(range(100, 132), "x", max_tokens=2)
        assert policy.hits == [16]
        engine.step()
        assert policy.hits == [32]
        engine.run()


def test_a_hit_is_that_of_the_request_and_not_of_an_earlier_one_with_its_id() -> None:
    policy = AsksAgain()
    with harness(policy) as engine:
        engine.add(range(40), "first", max_tokens=1)
        engine.run()
        policy.kept.clear()
        engine.add(range(40), "x", max_tokens=1)
        assert policy.hits == [32]
        engine.finish("x")
        engine.add(range(100, 140), "x", max_tokens=1)
        assert policy.hits == [32, 0]
        engine.run()


def test_the_clock_stands_still_during_a_call() -> None:
    times: list[float] = []

    class Reads(SchedulingPolicy):
        def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
            times.append(view.now)
            return window

        def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
            times.append(view.now)
            return AdmitDecision.accept()

    engine = harness(Reads())
    for name in "abc":
        engine.add([1, 2], name, max_tokens=1)
    times.clear()
    engine.advance(2.5)
    engine.step()
    assert set(times) == {2.5}


# What it may not return


@pytest.mark.parametrize(
    ("point", "answer", "told"),
    [
        ("running_order", 3, "from running_order; it must be a sequence"),
        ("waiting_order", ["a"], "returned others than it was given from waiting_order"),
        ("token_budget", "many", "from token_budget; it must be a number, 0 or more, or None"),
        ("prefill_budget", -1, "returned -1 from prefill_budget"),
        ("max_running", math.nan, "returned nan from max_running"),
        ("chunk_size", 99, "from chunk_size; it must be a number of tokens from 0 to 4"),
        ("preempt_mode", "later", "returned 'later' from preempt_mode; it must be PreemptMode.RECOMPUTE"),
        ("wake_at", "soon", "returned 'soon' from wake_at"),
    ],
)
def test_an_answer_that_is_none_names_the_policy_the_point_and_what_is_allowed(
    point: str, answer: object, told: str
) -> None:
    kind = type("Odd", (SchedulingPolicy,), {point: lambda self, *given: answer})
    overrides = ["kv_cache.num_blocks=2", "kv_cache.block_size=4", "scheduler.max_num_seqs=2"]
    engine = harness(kind(), *overrides)
    engine.add(range(4), "a", max_tokens=3)
    engine.add(range(4), "b", max_tokens=3)

    def ask() -> None:
        engine.step()
        engine.step()
        engine.scheduler.wake_at()

    with pytest.raises((PluginError, EngineDeadError), match=f"policy probe .*{told}"):
        ask()


def test_one_request_twice_is_refused() -> None:
    class Twice(SchedulingPolicy):
        def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
            return [*running, *running]

    engine = harness(Twice())
    engine.add(range(4), "a", max_tokens=3)
    engine.step()
    with pytest.raises(EngineDeadError, match="policy probe returned one twice from running_order"):
        engine.step()


@pytest.mark.parametrize("window", [0, True, "all"])
def test_a_window_that_is_none_is_refused_at_launch(window: object) -> None:
    kind = type("Odd", (SchedulingPolicy,), {"waiting_window": window})
    with pytest.raises(PluginError, match="waiting_window"):
        harness(kind())
