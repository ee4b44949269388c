"""E5: pause and resume in their three modes, under every loop."""

from __future__ import annotations

import pytest
from loop_parts import LOOPS, OldScheduler, Rig, Timetable, make_rig, request, token_of
from tokenyard.engine.driver import drive
from tokenyard.errors import UnsupportedError, UserError, ValidationError
from tokenyard.interfaces import PauseMode
from tokenyard.request import FinishReason

every_loop = pytest.mark.parametrize("loop", LOOPS)
every_mode = pytest.mark.parametrize("mode", PauseMode)
STARTED, WAITING = ("a", "b"), ("c", "d")


def busy_rig(loop: str) -> Rig:
    """Two requests that have started and two that wait."""
    rig = make_rig(loop, max_num_seqs=2)
    for name in (*STARTED, *WAITING):
        rig.engine.add_request(request(name, max_tokens=5))
    rig.step()
    return rig


def run_until_nothing_runs(rig: Rig) -> None:
    for _ in range(100):
        if not rig.step().did_run:
            return
    raise RuntimeError("a paused engine went on and on")


def started(rig: Rig) -> set[str]:
    """Ids that the executor has seen."""
    return {start.request_id for step in rig.executor.steps for start in step.new}


def whole(name: str, max_tokens: int = 5) -> list[int]:
    return [token_of(name, 5 + index) for index in range(max_tokens)]


@every_loop
def test_e5_keep_runs_nothing_more_and_everything_goes_on_at_resume(loop: str) -> None:
    rig = busy_rig(loop)
    num_scheduled = len(rig.executor.steps)
    assert not rig.engine.pause(PauseMode.KEEP)
    assert rig.engine.is_paused
    run_until_nothing_runs(rig)
    assert len(rig.executor.steps) == num_scheduled
    assert len(rig.inbox.tokens["a"]) == num_scheduled  # steps in flight were taken in
    assert not rig.inbox.ended
    rig.engine.resume()
    assert not rig.engine.is_paused
    rig.run()
    assert rig.inbox.tokens == {name: whole(name) for name in (*STARTED, *WAITING)}


@every_loop
def test_e5_wait_lets_what_has_started_end_and_starts_nothing(loop: str) -> None:
    rig = busy_rig(loop)
    assert not rig.engine.pause(PauseMode.WAIT)
    rig.engine.add_request(request("e", max_tokens=5))
    run_until_nothing_runs(rig)
    assert set(rig.inbox.ended) == started(rig) == set(STARTED)
    assert rig.inbox.tokens == {name: whole(name) for name in STARTED}
    rig.engine.resume()
    rig.run()
    assert set(rig.inbox.ended) == {*STARTED, *WAITING, "e"}


@every_loop
def test_e5_abort_ends_everything_that_is_there_and_names_it(loop: str) -> None:
    rig = busy_rig(loop)
    before = dict(rig.inbox.tokens)
    assert set(rig.engine.pause(PauseMode.ABORT)) == {*STARTED, *WAITING}
    rig.engine.add_request(request("e", max_tokens=5))
    run_until_nothing_runs(rig)
    assert started(rig) == set(STARTED)
    assert rig.inbox.tokens == before  # tokens in flight were dropped
    assert not rig.inbox.ended  # they were told already
    rig.engine.resume()
    rig.run()
    assert list(rig.inbox.ended) == ["e"]
    assert rig.inbox.tokens["e"] == whole("e")


@every_loop
@every_mode
def test_e5_a_request_queued_while_paused_and_then_aborted_never_runs(loop: str, mode: PauseMode) -> None:
    rig = make_rig(loop)
    rig.engine.pause(mode)
    rig.engine.add_request(request("a"))
    assert not rig.step().did_run
    assert list(rig.engine.finish_requests(["a", "b"], FinishReason.ABORT)) == ["a"]
    rig.engine.resume()
    assert not rig.step().did_run
    assert not rig.executor.steps
    rig.check_idle()


@every_loop
def test_a_second_pause_replaces_the_mode_of_the_first(loop: str) -> None:
    rig = busy_rig(loop)
    rig.engine.pause(PauseMode.WAIT)
    rig.engine.pause(PauseMode.KEEP)
    run_until_nothing_runs(rig)
    assert not rig.inbox.ended
    rig.engine.pause(PauseMode.WAIT)
    run_until_nothing_runs(rig)
    assert set(rig.inbox.ended) == set(STARTED)
    rig.engine.pause(PauseMode.KEEP)
    rig.engine.resume()  # undoes all of it: the first mode is not left behind
    rig.run()
    assert set(rig.inbox.ended) == {*STARTED, *WAITING}


@every_loop
def test_a_pause_with_abort_after_another_ends_what_was_kept(loop: str) -> None:
    rig = busy_rig(loop)
    rig.engine.pause(PauseMode.WAIT)
    assert set(rig.engine.pause(PauseMode.ABORT)) == {*STARTED, *WAITING}
    assert not rig.engine.pause(PauseMode.ABORT)
    run_until_nothing_runs(rig)
    rig.check_idle()


@every_loop
@every_mode
def test_driving_a_paused_engine_says_that_it_is_paused_and_does_not_hurt_it(loop: str, mode: PauseMode) -> None:
    rig = make_rig(loop)
    rig.engine.pause(mode)
    rig.engine.add_request(request("a"))
    with pytest.raises(UserError, match=r"paused.*resume\(\)"):
        drive(rig.engine, rig.clock, rig.inbox.take)
    rig.engine.resume()
    drive(rig.engine, rig.clock, rig.inbox.take)
    assert rig.inbox.tokens["a"] == whole("a", 3)


@every_loop
def test_a_paused_engine_is_not_asked_again_before_the_next_arrival(loop: str) -> None:
    rig = make_rig(loop)
    rig.engine.pause()
    calls = []

    def deliver(outputs: object) -> None:
        calls.append(rig.clock.now())
        if len(calls) == 2:
            rig.engine.finish_requests(["a", "b"], FinishReason.ABORT)

    drive(rig.engine, rig.clock, deliver, Timetable([request("a", 0.0), request("b", 50.0)]))
    assert calls == [0.0, 50.0]


@every_loop
def test_an_idle_engine_may_be_paused_and_driven(loop: str) -> None:
    rig = make_rig(loop)
    assert not rig.engine.pause(PauseMode.ABORT)
    drive(rig.engine, rig.clock, rig.inbox.take)


@every_loop
def test_the_prefix_cache_may_be_reset_while_paused_once_nothing_holds_blocks(loop: str) -> None:
    rig = busy_rig(loop)
    rig.engine.pause(PauseMode.ABORT)
    run_until_nothing_runs(rig)
    assert rig.engine.reset_prefix_cache()
    rig.engine.resume()
    rig.check_idle()


@every_loop
def test_a_scheduler_of_an_older_api_pauses_by_keep_and_abort_and_refuses_wait_by_name(loop: str) -> None:
    scheduler = OldScheduler()
    rig = make_rig(loop, scheduler=scheduler)
    for name in "ab":
        rig.engine.add_request(request(name, max_tokens=9))
    rig.step()
    with pytest.raises(UnsupportedError, match=r"OldScheduler.*'keep' or 'abort'"):
        rig.engine.pause(PauseMode.WAIT)
    assert not rig.engine.is_paused
    assert len(rig.step().request_ids) == 2
    rig.engine.pause(PauseMode.KEEP)
    with pytest.raises(UnsupportedError):
        rig.engine.pause(PauseMode.WAIT)
    run_until_nothing_runs(rig)  # still paused as before
    assert set(rig.engine.pause(PauseMode.ABORT)) == {"a", "b"}
    rig.engine.resume()
    rig.engine.add_request(request("c"))
    rig.run()
    assert list(rig.inbox.ended) == ["c"]


def test_a_mode_that_does_not_exist_is_refused_with_the_three_that_do() -> None:
    rig = make_rig()
    with pytest.raises(ValidationError, match=r"'stop'.*'keep', 'wait', 'abort'"):
        rig.engine.pause("stop")  # type: ignore[arg-type]
    assert not rig.engine.is_paused
