"""The overlap loop: the order of its calls, requests that end in flight, and tokens equal to the sync loop's."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_parts import LOOPS, Inbox, OldScheduler, Recorder, Rig, Timetable, make_rig, request, token_of
from tokenyard.engine.driver import drive
from tokenyard.engine.overlap import OverlapEngineCore
from tokenyard.errors import EngineDeadError
from tokenyard.interfaces import PauseMode
from tokenyard.request import FinishReason

overlap_loops = pytest.mark.parametrize("loop", [name for name in LOOPS if name != "sync"])
every_loop = pytest.mark.parametrize("loop", LOOPS)


def depth_of(loop: str) -> int:
    return 4 if "4" in loop else 2


def logged_rig(loop: str) -> Rig:
    """Scheduler and executor write into one log."""
    scheduler = OldScheduler()
    rig = make_rig(loop, scheduler=scheduler)
    scheduler.log = rig.executor.log
    return rig


def expected_log(num_steps: int, depth: int) -> list[str]:
    """As many steps as fit are handed over before the oldest is waited for."""
    log: list[str] = []
    for step in range(num_steps):
        log += [f"schedule {step}", f"execute {step}"]
        if step >= depth - 1:
            log += [f"land {step - depth + 1}", f"update {step - depth + 1}"]
    for step in range(max(0, num_steps - depth + 1), num_steps):
        log += [f"land {step}", f"update {step}"]
    return log


@overlap_loops
@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_the_next_steps_are_handed_over_before_the_oldest_is_waited_for(loop: str, num_steps: int) -> None:
    rig = logged_rig(loop)
    rig.engine.add_request(request("a", max_tokens=num_steps))
    rig.run()
    assert rig.executor.log == expected_log(num_steps, depth_of(loop))


def test_a_loop_without_a_step_in_flight_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="depth=0"):
        OverlapEngineCore(None, depth=0)  # type: ignore[arg-type]


@overlap_loops
def test_each_call_of_step_takes_in_one_step_and_has_requests_until_the_last_one(loop: str) -> None:
    rig = logged_rig(loop)
    rig.engine.add_request(request("a", max_tokens=5))
    num_updates = 0
    while rig.engine.has_requests():
        assert rig.step().did_run
        num_updates += 1
        assert sum(entry.startswith("update") for entry in rig.executor.log) == num_updates
    assert num_updates == 5
    assert not rig.step().did_run


@overlap_loops
def test_requests_that_end_in_flight_get_no_more_tokens_and_the_engine_waits_for_their_steps(loop: str) -> None:
    rig = make_rig(loop)
    for name in "ab":
        rig.engine.add_request(request(name, max_tokens=20))
    rig.step()
    before = {name: list(tokens) for name, tokens in rig.inbox.tokens.items()}
    assert set(rig.engine.finish_requests(["a", "b"], FinishReason.ABORT)) == {"a", "b"}
    assert rig.engine.has_requests()  # their steps are in flight
    assert rig.kv.usage.num_free_blocks < rig.kv.usage.num_total_blocks
    assert not rig.engine.reset_prefix_cache()
    rig.run()
    assert rig.inbox.tokens == before
    assert not rig.inbox.ended
    assert rig.engine.reset_prefix_cache()


@overlap_loops
def test_sch_14_an_abort_between_schedule_and_update_of_the_last_chunk_leaves_no_token(loop: str) -> None:
    rig = make_rig(loop, max_num_batched_tokens=4)
    rig.engine.add_request(request("a", num_prompt=8, max_tokens=20))
    rig.step()  # the first half; the second is in flight
    assert len(rig.executor.steps) >= 2
    rig.engine.finish_requests(["a"], FinishReason.ABORT)
    rig.run()
    assert rig.inbox == Inbox()


@overlap_loops
def test_the_clock_waits_for_each_step_in_turn(loop: str) -> None:
    recorder = Recorder()
    rig = make_rig(loop, observers=[recorder])
    drive(rig.engine, rig.clock, rig.inbox.take, Timetable([request("a", 0.0), request("b", 10.0)]))
    assert recorder.times == sorted(recorder.times)
    assert set(recorder.times) >= {1.0, 2.0, 3.0, 11.0, 12.0, 13.0}  # a step is a second, one after the other
    assert all(later - earlier >= 1.0 for earlier, later in pairwise(recorder.times))
    assert list(rig.inbox.ended) == ["a", "b"]


@overlap_loops
def test_a_step_is_scheduled_before_the_one_before_it_is_done(loop: str) -> None:
    rig = make_rig(loop)
    rig.engine.add_request(request("a", max_tokens=20))
    rig.step()
    scheduled_at = [step.scheduled_at for step in rig.executor.steps]
    assert scheduled_at == [0.0] * depth_of(loop)  # though each takes a second
    rig.step()
    assert rig.executor.steps[-1].scheduled_at == 1.0


@overlap_loops
@pytest.mark.parametrize("fails_at", [0, 1])
def test_nothing_is_taken_in_after_a_step_that_failed(loop: str, fails_at: int) -> None:
    rig = make_rig(loop, fails_at=fails_at)
    rig.engine.add_request(request("a", max_tokens=20))
    for _ in range(fails_at):
        rig.step()
    with pytest.raises(EngineDeadError, match="on fire"):
        rig.engine.step()
    assert not rig.engine.has_requests()
    with pytest.raises(EngineDeadError, match="on fire"):
        rig.engine.step()
    assert [entry for entry in rig.executor.log if entry.startswith("land")] == [
        f"land {step}" for step in range(fails_at + 1)
    ]


@overlap_loops
def test_shutdown_with_steps_in_flight_leaves_nothing_to_wait_for(loop: str) -> None:
    recorder = Recorder()
    rig = make_rig(loop, observers=[recorder])
    rig.engine.add_request(request("a", max_tokens=20))
    rig.step()
    rig.engine.finish_requests(["a"], FinishReason.ABORT)
    rig.engine.shutdown()
    assert not rig.engine.has_requests()
    assert (recorder.steps, recorder.num_shutdowns) == ([0], 1)
    assert rig.executor.is_shut_down


@every_loop
@pytest.mark.parametrize("num_blocks", [9, 12, 64])
@pytest.mark.parametrize("budget", [3, 7, 100])
def test_no_loop_pool_or_budget_changes_the_tokens(loop: str, num_blocks: int, budget: int) -> None:
    rig = make_rig(loop, num_blocks=num_blocks, block_size=2, max_num_batched_tokens=budget, max_num_seqs=3)
    lengths = {f"r{index}": (1 + index % 5, 1 + index * 3 % 11) for index in range(12)}
    for name, (num_prompt, max_tokens) in lengths.items():
        rig.engine.add_request(request(name, num_prompt=num_prompt, max_tokens=max_tokens))
    rig.run()
    assert rig.inbox.tokens == {
        name: [token_of(name, num_prompt + index) for index in range(max_tokens)]
        for name, (num_prompt, max_tokens) in lengths.items()
    }
    if num_blocks == 9 and budget == 100:
        assert rig.engine.stats().num_preemptions > 0


ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 12), st.integers(1, 9)),
    st.tuples(st.just("step"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("finish"), st.integers(0, 7), st.just(0)),
    st.tuples(st.just("pause"), st.sampled_from([0, 1, 2]), st.just(0)),
    st.tuples(st.just("resume"), st.just(0), st.just(0)),
)


@settings(max_examples=150, deadline=None)
@given(
    loop=st.sampled_from(list(LOOPS)),
    num_blocks=st.integers(7, 20),
    budget=st.sampled_from([1, 3, 7, 40]),
    actions=st.lists(ACTIONS, max_size=40),
)
def test_whatever_happens_every_request_ends_once_with_its_own_tokens_and_leaves_no_block(
    loop: str, num_blocks: int, budget: int, actions: Sequence[tuple[str, int, int]]
) -> None:
    rig = make_rig(loop, num_blocks=num_blocks, block_size=3, max_num_batched_tokens=budget, max_num_seqs=3)
    wanted: dict[str, tuple[int, int]] = {}
    alive: list[str] = []
    aborted: set[str] = set()
    for kind, first, second in actions:
        if kind == "add":
            name = f"r{len(wanted)}"
            wanted[name] = (first, second)
            rig.engine.add_request(request(name, num_prompt=first, max_tokens=second))
            alive.append(name)
        elif kind == "step":
            for _ in range(first):
                rig.step()
        elif kind == "finish" and first < len(alive):
            aborted.update(rig.engine.finish_requests([alive[first]], FinishReason.ABORT))
        elif kind == "pause":
            aborted.update(rig.engine.pause(list(PauseMode)[first]))
        elif kind == "resume":
            rig.engine.resume()
        alive = [name for name in wanted if name not in aborted and name not in rig.inbox.ended]
    rig.engine.resume()
    rig.run()
    assert aborted.isdisjoint(rig.inbox.ended)
    assert aborted | set(rig.inbox.ended) == set(wanted)
    for name, (num_prompt, max_tokens) in wanted.items():
        whole = [token_of(name, num_prompt + index) for index in range(max_tokens)]
        tokens = rig.inbox.tokens.get(name, [])
        assert tokens == (whole[: len(tokens)] if name in aborted else whole)
