"""E1 and E5 of the public engine behaviours, and deadlines."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenyard.errors import ValidationError
from tokenyard.interfaces import ExtraKey, PauseMode, WaitReason
from tokenyard.request import FinishReason
from tokenyard.testing import EngineHarness

MakeHarness = Callable[..., EngineHarness]

LOOPS = pytest.mark.parametrize("loop", ["sync", "overlap"])


@LOOPS
def test_e1_requests_wait_run_and_end_by_id(harness: MakeHarness, loop: str) -> None:
    engine = harness(f"engine={loop}")
    first, second = engine.add([1, 2, 3], request_id="a"), engine.add([4, 5, 6], request_id="b")
    assert (engine.waiting, engine.running) == ([first, second], [])
    engine.step()
    assert (engine.waiting, engine.running) == ([], [first, second])
    assert list(engine.finish(["unknown", "b", "nobody"])) == ["b"]
    assert engine.running == ["a"]
    with pytest.raises(ValidationError, match="'a' is in use"):
        engine.add([1, 2, 3], request_id="a")
    engine.run()
    again = engine.add([1, 2, 3], request_id="a", max_tokens=2)
    engine.run()
    assert len(engine.request(again).output_token_ids) == 2
    with pytest.raises(TypeError, match="a request id is a string; got 7"):
        engine.add([1, 2, 3], request_id=7)  # type: ignore[arg-type]
    assert not engine.has_requests
    engine.check_idle()


@LOOPS
def test_e5_keep_freezes_and_resume_goes_on(harness: MakeHarness, loop: str) -> None:
    engine = harness(f"engine={loop}")
    running = engine.add([1, 2, 3], max_tokens=9)
    engine.step()
    assert list(engine.pause(PauseMode.KEEP)) == []
    queued, dropped = engine.add([4, 5, 6], max_tokens=3), engine.add([7, 8, 9], max_tokens=3)
    for _ in range(4):
        engine.step()
    frozen = len(engine.request(running).output_token_ids)
    assert frozen <= 2  # one more may have been in flight
    engine.step()
    assert len(engine.request(running).output_token_ids) == frozen
    assert list(engine.finish(dropped)) == [dropped]
    engine.resume()
    while engine.has_requests:
        engine.step()
        assert dropped not in engine.scheduled  # queued while paused and then aborted: it never runs
    assert len(engine.request(running).output_token_ids) == 9
    assert len(engine.request(queued).output_token_ids) == 3
    assert engine.request(dropped).output_token_ids == []
    engine.check_idle()


@LOOPS
def test_e5_wait_lets_what_has_started_end(harness: MakeHarness, loop: str) -> None:
    engine = harness(f"engine={loop}", "scheduler.max_num_seqs=1")
    running, queued = engine.add([1, 2, 3], max_tokens=6), engine.add([4, 5, 6], max_tokens=3)
    engine.step()
    assert list(engine.pause(PauseMode.WAIT)) == []
    for _ in range(12):
        engine.step()
    assert engine.request(running).finish_reason == "length"
    assert engine.request(queued).status == "waiting"
    assert engine.request(queued).wait_reason is WaitReason.PAUSED
    engine.resume()
    engine.run()
    assert len(engine.request(queued).output_token_ids) == 3
    engine.check_idle()


@LOOPS
def test_e5_wait_lets_a_preempted_request_end_too(harness: MakeHarness, loop: str) -> None:
    engine = harness(f"engine={loop}", "kv_cache.num_blocks=5", "kv_cache.block_size=4", "model.max_model_len=20")
    first, second = engine.add([1] * 6, max_tokens=12), engine.add([2] * 6, max_tokens=12)
    while not engine.stats.num_preemptions:
        engine.step()
    queued = engine.add([3] * 6, max_tokens=2)
    engine.pause(PauseMode.WAIT)
    for _ in range(60):
        engine.step()
    assert [len(engine.request(name).output_token_ids) for name in (first, second, queued)] == [12, 12, 0]
    engine.resume()
    engine.run()
    engine.check_idle()


@LOOPS
def test_e5_abort_ends_what_is_there_and_keeps_what_comes(harness: MakeHarness, loop: str) -> None:
    engine = harness(f"engine={loop}", "scheduler.max_num_seqs=1")
    running, waiting = engine.add([1, 2, 3], max_tokens=9), engine.add([4, 5, 6], max_tokens=9)
    engine.step()
    had = list(engine.request(running).output_token_ids)
    assert sorted(engine.pause(PauseMode.ABORT)) == sorted([running, waiting])
    later = engine.add([7, 8, 9], max_tokens=3)
    for _ in range(4):
        engine.step()
    assert engine.request(running).output_token_ids == had
    assert [engine.request(name).finish_reason for name in (running, waiting, later)] == ["abort", "abort", None]
    engine.resume()
    engine.run()
    assert len(engine.request(later).output_token_ids) == 3
    engine.check_idle()


@LOOPS
@pytest.mark.parametrize("state", ["waiting", "running", "paused"])
def test_a_deadline_ends_a_request_wherever_it_is(harness: MakeHarness, loop: str, state: str) -> None:
    engine = harness(f"engine={loop}", "scheduler.max_num_seqs=1")
    other = engine.add([1, 2, 3], max_tokens=40)
    if state == "waiting":
        engine.step()
    late = engine.add([4, 5, 6], max_tokens=40, deadline=5.0)
    if state != "waiting":
        engine.finish(other)
        engine.step()
        engine.step()
    if state == "paused":
        engine.pause()
        engine.step()
        engine.step()
    had = list(engine.request(late).output_token_ids)
    assert engine.core.wake_at() == 5.0
    engine.clock.wait(5.0)
    engine.step()
    request = engine.request(late)
    assert (request.finish_reason, request.stop_reason, request.output_token_ids) == ("abort", "deadline", had)
    assert engine.core.wake_at() is None
    engine.resume()
    engine.run()
    engine.check_idle()


def test_a_request_that_ends_before_its_deadline_is_not_ended_again(harness: MakeHarness) -> None:
    engine = harness()
    engine.add([1, 2, 3], request_id="a", max_tokens=1, deadline=5.0)
    engine.run()
    engine.add([1, 2, 3], request_id="a", max_tokens=2)
    engine.step()
    engine.clock.wait(6.0)
    engine.run()
    assert engine.request("a").finish_reason == "length"


@pytest.mark.parametrize("fails", [False, True])
def test_e1_the_id_of_an_ended_request_is_free_at_once_though_its_step_is_in_flight(
    harness: MakeHarness, fails: bool
) -> None:
    engine = harness("engine=overlap", "kv_cache.enable_prefix_caching=true")
    engine.add([1, 2, 3], request_id="a", max_tokens=9)
    engine.step()
    engine.finish("a")
    engine.add([4, 5, 6], request_id="a", max_tokens=2)
    assert engine.waiting == ["a"]
    engine.step(errors={"a": "what the ended request computed is not finite"} if fails else None)
    engine.run()
    request = engine.request("a")
    assert (request.finish_reason, len(request.output_token_ids)) == ("length", 2)
    engine.check_idle()


@pytest.mark.parametrize(
    ("field", "value"), [("deadline", "x"), ("deadline", float("nan")), ("priority", "a"), ("arrival", None)]
)
def test_a_number_that_is_none_is_refused_by_name(harness: MakeHarness, field: str, value: object) -> None:
    engine = harness()
    if value is None:
        field, value = "arrival", float("nan")
    name = {"arrival": "arrival_time"}.get(field, field)
    with pytest.raises(ValidationError, match=name):
        engine.add([1, 2, 3], **{field: value})
    assert not engine.has_requests


def test_a_stop_id_that_is_the_eos_is_the_reason_where_eos_is_ignored(harness: MakeHarness) -> None:
    engine = harness()
    name = engine.add([1, 2, 3], ignore_eos=True, stop_token_ids=[engine.eos_token_id])
    engine.step(tokens={name: engine.eos_token_id})
    assert (engine.request(name).finish_reason, engine.request(name).stop_reason) == ("stop", engine.eos_token_id)


def test_e1_a_single_string_is_no_list_of_ids(harness: MakeHarness) -> None:
    engine = harness()
    engine.add([1], request_id="a")
    with pytest.raises(TypeError, match="a list of request ids"):
        engine.core.finish_requests("a", FinishReason.ABORT)
    assert engine.waiting == ["a"]


@pytest.mark.parametrize("extra", [1, ExtraKey("x", 3, 1), ExtraKey("x", -1, 1), ("x", 0, 1)])
def test_an_extra_key_that_is_none_is_refused(harness: MakeHarness, extra: object) -> None:
    engine = harness()
    with pytest.raises(ValidationError, match="extra_keys"):
        engine.add([1, 2, 3], extra_keys=[extra])  # type: ignore[list-item]
    assert not engine.has_requests
