"""What all loops share, and the driver, with collaborators that record what is asked of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from loop_parts import LOOPS, OldScheduler, Recorder, Timetable, make_rig, request, token_of
from tokenyard.engine.driver import drive
from tokenyard.errors import EngineDeadError, UserError, ValidationError
from tokenyard.interfaces import EngineCore, Observer, PauseMode
from tokenyard.request import EngineCoreRequest, FinishReason
from tokenyard.scheduler import BatchScheduler
from tokenyard.scheduler_output import SchedulerOutput

every_loop = pytest.mark.parametrize("loop", LOOPS)


class SleepyScheduler(BatchScheduler):
    """Runs nothing before its time."""

    opens_at = 5.0

    def schedule(self) -> SchedulerOutput | None:
        return super().schedule() if self._time.read() >= self.opens_at else None

    def wake_at(self) -> float | None:
        return self.opens_at if self._time.read() < self.opens_at else None


class InsistentScheduler(SleepyScheduler):
    """Never opens, and goes on naming a moment that has passed."""

    def schedule(self) -> SchedulerOutput | None:
        return None

    def wake_at(self) -> float | None:
        return self.opens_at


class Unruly(Observer):
    """A debugging aid that somebody left in."""

    def on_shutdown(self) -> None:
        raise ValueError("observer bug")


def test_sync_schedules_executes_and_updates_one_step_after_the_other() -> None:
    scheduler = OldScheduler()
    rig = make_rig(scheduler=scheduler)
    scheduler.log = rig.executor.log
    rig.engine.add_request(request("a", max_tokens=2))
    rig.run()
    assert rig.executor.log == [
        *("schedule 0", "execute 0", "land 0", "update 0"),
        *("schedule 1", "execute 1", "land 1", "update 1"),
    ]


def test_time_passes_only_in_steps_and_until_the_next_arrival() -> None:
    recorder = Recorder()
    rig = make_rig(observers=[recorder])
    drive(rig.engine, rig.clock, rig.inbox.take, Timetable([request("a", 0.0), request("b", 10.0)]))
    assert list(rig.inbox.ended) == ["a", "b"]
    assert recorder.times == [1.0, 2.0, 3.0, 11.0, 12.0, 13.0]


def test_an_arrival_during_a_step_joins_the_next_one() -> None:
    rig = make_rig()
    drive(rig.engine, rig.clock, rig.inbox.take, Timetable([request("a", 0.0), request("b", 0.5)]))
    assert [step.num_rows for step in rig.executor.steps] == [1, 2, 2, 1]


@every_loop
@pytest.mark.parametrize(
    ("arrivals", "times"),
    [
        ((0.0,), [6.0, 7.0, 8.0]),  # only the scheduler knows a moment
        ((0.0, 20.0), [6.0, 7.0, 8.0, 21.0, 22.0, 23.0]),  # the scheduler's comes first
        ((0.0, 2.0), [6.0, 7.0, 8.0]),  # an arrival comes first, and nothing runs for it
    ],
)
def test_an_engine_that_waits_is_stepped_again_when_its_scheduler_asked_to_be(
    loop: str, arrivals: Sequence[float], times: list[float]
) -> None:
    recorder = Recorder()
    rig = make_rig(loop, observers=[recorder], scheduler_type=SleepyScheduler)
    requests = [request(f"r{index}", arrival) for index, arrival in enumerate(arrivals)]
    drive(rig.engine, rig.clock, rig.inbox.take, Timetable(requests))
    assert recorder.times == times
    rig.check_idle()


@every_loop
@pytest.mark.parametrize(("mode", "given_up_at"), [(PauseMode.KEEP, 0.0), (PauseMode.WAIT, 5.0)])
def test_a_paused_engine_waits_for_a_moment_of_its_scheduler_only_if_that_could_run_something(
    loop: str, mode: PauseMode, given_up_at: float
) -> None:
    rig = make_rig(loop, scheduler_type=SleepyScheduler)
    rig.engine.pause(mode)
    rig.engine.add_request(request("a"))
    with pytest.raises(UserError, match="paused"):
        drive(rig.engine, rig.clock, rig.inbox.take)
    assert rig.clock.now() == given_up_at


@every_loop
def test_an_engine_that_can_neither_run_nor_wait_is_reported_instead_of_hanging(loop: str) -> None:
    rig = make_rig(loop, scheduler_type=InsistentScheduler)
    rig.engine.add_request(request("a"))
    with pytest.raises(EngineDeadError, match="neither run nor wait"):
        drive(rig.engine, rig.clock, rig.inbox.take)
    assert rig.clock.now() == InsistentScheduler.opens_at  # it was asked once more when it said so, and then no more


@every_loop
def test_whoever_takes_the_outputs_may_end_the_requests_of_an_engine_that_cannot_run(loop: str) -> None:
    rig = make_rig(loop, scheduler_type=InsistentScheduler)
    rig.engine.add_request(request("a"))
    drive(rig.engine, rig.clock, lambda outputs: _abort(rig.engine, "a"))
    rig.check_idle()


def _abort(engine: EngineCore, request_id: str) -> None:
    engine.finish_requests([request_id], FinishReason.ABORT)


@every_loop
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_failed_step_ends_the_engine_and_every_later_call_says_why(loop: str, fails_at: int) -> None:
    rig = make_rig(loop, fails_at=fails_at)
    rig.engine.add_request(request("a", max_tokens=9))
    with pytest.raises(EngineDeadError, match="on fire") as caught:
        drive(rig.engine, rig.clock, rig.inbox.take)
    assert caught.value.__cause__ is rig.executor.error
    assert not rig.engine.has_requests()
    for call in (
        rig.engine.step,
        rig.engine.pause,
        rig.engine.reset_prefix_cache,
        lambda: rig.engine.add_request(request("b")),
        lambda: rig.engine.finish_requests(["a"], FinishReason.ABORT),
    ):
        with pytest.raises(EngineDeadError, match="on fire") as caught:
            call()
        assert caught.value.__cause__ is rig.executor.error
    rig.engine.shutdown()
    assert rig.executor.is_shut_down


@every_loop
def test_ctrl_c_inside_a_step_stays_what_it_is_and_ends_the_engine(loop: str) -> None:
    rig = make_rig(loop, fails_at=0)
    rig.executor.error = KeyboardInterrupt()
    rig.engine.add_request(request("a"))
    with pytest.raises(KeyboardInterrupt):
        rig.engine.step()
    with pytest.raises(EngineDeadError, match="KeyboardInterrupt"):
        rig.engine.step()


@every_loop
def test_observers_are_told_of_every_updated_step_once_and_in_order(loop: str) -> None:
    recorder = Recorder()
    rig = make_rig(loop, observers=[recorder])
    for index in range(4):
        rig.engine.add_request(request(f"r{index}", max_tokens=2 + index))
    delivered = []
    while rig.engine.has_requests():
        delivered.append(rig.step())
    assert recorder.steps == [step.step for step in rig.executor.steps] == list(range(len(delivered)))
    assert all(told is given for told, given in zip(recorder.results, delivered, strict=True))


@every_loop
def test_an_observer_that_fails_is_switched_off_and_changes_nothing(
    loop: str, caplog: pytest.LogCaptureFixture
) -> None:
    bad, good = Recorder(fails=True), Recorder()
    rig = make_rig(loop, observers=[bad, good])
    rig.engine.add_request(request("a"))
    rig.run()
    assert (len(bad.times), len(good.times)) == (1, len(rig.executor.steps))
    assert "Recorder failed" in caplog.text
    assert rig.inbox.tokens == {"a": [token_of("a", position) for position in (5, 6, 7)]}


@every_loop
def test_shutdown_is_final_and_may_be_repeated(loop: str, caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    rig = make_rig(loop, observers=[Unruly(), recorder])
    rig.engine.add_request(request("a"))
    rig.step()
    rig.engine.shutdown()
    rig.engine.shutdown()
    assert rig.executor.is_shut_down
    assert recorder.num_shutdowns == 1
    assert "Unruly failed at shutdown" in caplog.text
    for call in (rig.engine.step, lambda: rig.engine.add_request(request("b")), rig.engine.pause):
        with pytest.raises(EngineDeadError, match="shut down"):
            call()


@every_loop
def test_e1_requests_wait_then_run_and_are_ended_by_a_list_with_unknown_ids(loop: str) -> None:
    rig = make_rig(loop, max_num_seqs=2)
    for name in "abc":
        rig.engine.add_request(request(name, max_tokens=9))
    assert rig.engine.stats().num_waiting == 3
    rig.step()
    assert (rig.engine.stats().num_running, rig.engine.stats().num_waiting) == (2, 1)
    assert list(rig.engine.finish_requests(["c", "nobody", "a", "c"], FinishReason.ABORT)) == ["c", "a"]
    assert list(rig.engine.finish_requests(["c", "a"], FinishReason.ABORT)) == []
    rig.run()
    assert list(rig.inbox.ended) == ["b"]


@every_loop
def test_e1_the_id_of_a_request_that_has_ended_may_be_used_again(loop: str) -> None:
    rig = make_rig(loop)
    rig.engine.add_request(request("a"))
    with pytest.raises(ValidationError, match="in use"):
        rig.engine.add_request(request("a"))
    rig.run()
    rig.inbox.ended.clear()
    rig.engine.add_request(request("a"))
    rig.run()
    assert rig.inbox.tokens["a"] == 2 * [token_of("a", position) for position in (5, 6, 7)]


@every_loop
@pytest.mark.parametrize("request_id", [1, None, b"a", ("a",)])
def test_e1_a_request_id_that_is_no_string_is_a_type_error_and_leaves_no_trace(loop: str, request_id: object) -> None:
    rig = make_rig(loop)
    with pytest.raises(TypeError, match="str"):
        rig.engine.add_request(_with_id(request_id))
    assert not rig.engine.has_requests()
    assert rig.engine.wake_at() is None


def _with_id(request_id: object) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=request_id,  # type: ignore[arg-type]
        prompt_token_ids=np.arange(3, dtype=np.int32),
        params=request("x").params,
        arrival_time=0.0,
        deadline=7.0,
    )
