"""Ends outside a step: a request's deadline, whatever the engine does at that moment."""

from __future__ import annotations

import pytest
from loop_parts import LOOPS, OldScheduler, Recorder, Timetable, make_rig, request, token_of
from tokenyard.engine.driver import drive
from tokenyard.interfaces import AdmitDecision, PauseMode, RequestView, SchedulerView, SchedulingPolicy
from tokenyard.request import FinishReason
from tokenyard.scheduler import BatchScheduler
from tokenyard.scheduler_output import SchedulerOutput

every_loop = pytest.mark.parametrize("loop", LOOPS)


class ClosedScheduler(BatchScheduler):
    """Lets requests end and starts none."""

    def schedule(self) -> SchedulerOutput | None:
        return None


class Bouncer(SchedulingPolicy):
    """Refuses everybody."""

    def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
        return AdmitDecision.reject("no entry")


@every_loop
def test_a_waiting_request_ends_at_its_deadline_when_nothing_can_run(loop: str) -> None:
    recorder = Recorder()
    rig = make_rig(loop, scheduler_type=ClosedScheduler, observers=[recorder])
    rig.engine.add_request(request("a", deadline=5.0))
    drive(rig.engine, rig.clock, rig.inbox.take)
    assert rig.clock.now() == 5.0
    assert (rig.inbox.ended["a"].reason, rig.inbox.ended["a"].stop_reason) == (FinishReason.ABORT, "deadline")
    assert not recorder.steps  # there was no step to tell of
    rig.check_idle()


@every_loop
@pytest.mark.parametrize("mode", PauseMode)
def test_a_request_ends_at_its_deadline_while_the_engine_is_paused(loop: str, mode: PauseMode) -> None:
    rig = make_rig(loop)
    rig.engine.pause(mode)
    requests = [request("a", deadline=5.0), request("b", deadline=3.0), request("c", 1.0, deadline=20.0)]
    times = []

    def deliver(outputs: object) -> None:
        times.append(rig.clock.now())
        rig.inbox.take(outputs)  # type: ignore[arg-type]

    drive(rig.engine, rig.clock, deliver, Timetable(requests))
    assert list(rig.inbox.ended) == ["b", "a", "c"]
    assert not rig.executor.steps
    assert sorted(set(times)) == [0.0, 1.0, 3.0, 5.0, 20.0]  # asked at these moments and never between
    assert len(times) <= 2 * 5
    rig.check_idle()


@every_loop
def test_the_outputs_of_an_end_without_a_step_say_that_something_happened_and_carry_no_tokens(loop: str) -> None:
    rig = make_rig(loop)
    rig.engine.pause()
    rig.engine.add_request(request("a", deadline=5.0))
    assert not rig.engine.step().did_run
    assert rig.engine.wake_at() == 5.0
    rig.clock.wait(5.0)
    outputs = rig.engine.step()
    assert outputs.did_run
    assert [end.request_id for end in outputs.finished] == ["a"]
    assert (len(outputs.request_ids), len(outputs.token_ids), len(outputs.num_tokens)) == (0, 0, 0)
    assert not rig.engine.step().did_run
    assert rig.engine.wake_at() is None


@every_loop
def test_a_running_request_keeps_the_tokens_it_had_at_its_deadline(loop: str) -> None:
    recorder = Recorder()
    rig = make_rig(loop, observers=[recorder])
    rig.engine.add_request(request("a", max_tokens=30, deadline=4.5))
    rig.engine.add_request(request("b", max_tokens=8))
    drive(rig.engine, rig.clock, rig.inbox.take)
    assert rig.inbox.ended["a"].stop_reason == "deadline"
    tokens = rig.inbox.tokens["a"]
    assert 1 <= len(tokens) <= 5
    assert tokens == [token_of("a", 5 + index) for index in range(len(tokens))]
    assert rig.inbox.tokens["b"] == [token_of("b", 5 + index) for index in range(8)]
    assert recorder.steps == list(range(len(rig.executor.steps)))
    rig.check_idle()


@every_loop
def test_a_deadline_that_a_request_does_not_reach_changes_nothing(loop: str) -> None:
    rig = make_rig(loop)
    rig.engine.add_request(request("a", deadline=1000.0))
    drive(rig.engine, rig.clock, rig.inbox.take)
    assert rig.inbox.ended["a"].reason is FinishReason.LENGTH
    assert rig.clock.now() < 10
    assert rig.engine.wake_at() is None


@every_loop
def test_requests_ended_by_others_are_not_waited_for(loop: str) -> None:
    rig = make_rig(loop)
    rig.engine.pause()
    rig.engine.add_request(request("a", deadline=5.0))
    rig.engine.add_request(request("b", deadline=9.0))
    rig.engine.finish_requests(["a"], FinishReason.ABORT)
    assert rig.engine.wake_at() == 9.0
    rig.engine.pause(PauseMode.ABORT)
    assert rig.engine.wake_at() is None


@every_loop
def test_a_request_that_the_policy_refuses_is_told_of_without_a_step_and_not_waited_for(loop: str) -> None:
    rig = make_rig(loop, policy=Bouncer())
    rig.engine.add_request(request("a", deadline=50.0))
    outputs = rig.step()
    assert outputs.did_run
    assert rig.inbox.ended["a"].reason is FinishReason.ERROR
    assert "no entry" in str(rig.inbox.ended["a"].error)
    assert rig.engine.wake_at() is None
    rig.check_idle()


@every_loop
def test_a_scheduler_that_knows_no_deadlines_is_not_asked_about_them_for_ever(loop: str) -> None:
    rig = make_rig(loop, scheduler=OldScheduler())
    rig.engine.add_request(request("a", deadline=5.0))
    rig.engine.pause()
    rig.engine.step()
    rig.clock.wait(rig.engine.wake_at())
    assert not rig.engine.step().did_run
    assert rig.engine.wake_at() is None
    rig.engine.resume()
    rig.run()
    assert rig.inbox.ended["a"].reason is FinishReason.LENGTH
