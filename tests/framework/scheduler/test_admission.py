"""Admission: deferral, refusal, wait reasons, and what happens when nothing could ever run."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scripted_engine import ScriptedEngine
from tokenyard.errors import PluginError, ValidationError
from tokenyard.interfaces import (
    AdmitDecision,
    Allocation,
    Hit,
    KVRequest,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    WaitReason,
)
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.request import FinishReason


class Choosy(SchedulingPolicy):
    """Defers and rejects by id."""

    def __init__(self, deferred: Sequence[str] = (), rejected: Sequence[str] = ()) -> None:
        self.deferred, self.rejected = set(deferred), set(rejected)

    def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
        if request.request_id in self.rejected:
            return AdmitDecision.reject("too late")
        return AdmitDecision.defer("not yet") if request.request_id in self.deferred else AdmitDecision.accept()

    def wake_at(self, view: SchedulerView) -> float | None:
        return view.now + 1.0


def waiting(engine: ScriptedEngine) -> dict[str, WaitReason | None]:
    return {row.request_id: row.wait_reason for row in engine.scheduler.snapshot().waiting}


def running(engine: ScriptedEngine) -> list[str]:
    return [row.request_id for row in engine.scheduler.snapshot().running]


def test_s8_skipped_requests_return_ahead_in_their_order_and_both_lengths_are_told() -> None:
    policy = Choosy(deferred=["r0", "r2"])
    engine = ScriptedEngine(policy=policy, max_num_seqs=2)
    for i in range(5):
        engine.add(f"r{i}", 8, arrival=float(i))
    engine.step()
    assert running(engine) == ["r1", "r3"]
    assert waiting(engine) == {
        "r0": WaitReason.DEFERRED,
        "r2": WaitReason.DEFERRED,
        "r4": WaitReason.MAX_NUM_SEQS,
    }
    assert (engine.scheduler.stats().num_waiting, engine.scheduler.stats().num_skipped) == (3, 2)
    policy.deferred = set()
    engine.finish("r1", "r3")
    engine.step()
    assert running(engine) == ["r0", "r2"]
    assert engine.scheduler.stats().num_skipped == 0


def test_a_deferred_request_tells_the_policys_words() -> None:
    engine = ScriptedEngine(policy=Choosy(deferred=["a"]))
    engine.add("a", 8)
    assert engine.schedule() is None
    (row,) = engine.scheduler.snapshot().waiting
    assert row.wait_detail == "not yet"
    assert engine.scheduler.wake_at() == 1.0


@pytest.mark.parametrize("moment", [None, 0.0, -1])
def test_a_policy_that_defers_everybody_for_good_ends_the_first_with_an_error(moment: float | None) -> None:
    class ForGood(Choosy):
        def wake_at(self, view: SchedulerView) -> float | None:
            return moment

    engine = ScriptedEngine(policy=ForGood(deferred=["a", "b"]))
    engine.add("a", 8)
    engine.add("b", 8)
    assert engine.schedule() is None
    (end,) = engine.scheduler.take_finished()
    assert (end.request_id, end.reason) == ("a", FinishReason.ERROR)
    assert end.error is not None
    assert "ForGood deferred the request (not yet) although nothing runs" in end.error
    assert engine.scheduler.stats().num_skipped == 1
    assert list(waiting(engine)) == ["b"]


def test_a_request_that_is_rejected_at_arrival_has_ended_before_any_step() -> None:
    engine = ScriptedEngine(policy=Choosy(rejected=["a"]))
    engine.add("a", 8)
    assert waiting(engine) == {}
    assert engine.scheduler.has_requests()  # its end was not told yet
    (end,) = engine.scheduler.take_finished()
    assert (end.request_id, end.reason) == ("a", FinishReason.ERROR)
    assert not engine.scheduler.has_requests()


@pytest.mark.parametrize("at_arrival", [True, False])
def test_a_rejected_request_ends_with_the_policys_reason(at_arrival: bool) -> None:
    policy = Choosy(rejected=["a"] if at_arrival else [])
    engine = ScriptedEngine(policy=policy)
    engine.add("a", 8)
    engine.add("b", 8, max_tokens=1)
    policy.rejected = {"a"}
    outputs = engine.step()
    assert outputs is not None
    assert {(end.request_id, end.reason, end.error) for end in outputs.finished} == {
        ("a", FinishReason.ERROR, "rejected by scheduling policy Choosy: too late"),
        ("b", FinishReason.LENGTH, None),
    }
    engine.check_idle()


def test_a_decision_that_is_none_is_refused() -> None:
    class Wrong(SchedulingPolicy):
        def admit(self, request, view):  # type: ignore[no-untyped-def]
            return True

    engine = ScriptedEngine(policy=Wrong())
    with pytest.raises(PluginError, match="Wrong returned True from admit; it must be AdmitDecision"):
        engine.add("a", 8)
    assert not engine.scheduler.has_requests()


def test_every_wait_has_its_reason() -> None:
    engine = ScriptedEngine(max_num_seqs=3, max_num_batched_tokens=32, num_blocks=10, block_size=4, max_model_len=64)
    engine.add("a", 20, max_tokens=12)
    assert waiting(engine) == {"a": WaitReason.NEW}
    engine.step()
    engine.add("b", 24, arrival=1.0)
    engine.add("c", 4, arrival=2.0)
    assert waiting(engine) == {"b": WaitReason.NEW, "c": WaitReason.NEW}
    engine.step()
    assert waiting(engine) == {"b": WaitReason.KV_BLOCKS, "c": WaitReason.BEHIND}
    assert engine.scheduler.stats().wait_reason == "kv_blocks"
    detail = engine.scheduler.snapshot(limit=1).waiting[0].wait_detail
    assert detail == "24 tokens to hold, 4 of 10 blocks were free"
    engine.scheduler.pause_admission(True)
    engine.step()
    assert set(waiting(engine).values()) == {WaitReason.PAUSED}
    engine.scheduler.pause_admission(False)
    engine.run()
    assert engine.scheduler.stats().wait_reason is None
    engine.check_idle()


def test_a_budget_that_is_used_up_is_the_reason() -> None:
    engine = ScriptedEngine(max_num_batched_tokens=16, max_num_seqs=8)
    engine.add("a", 16)
    engine.add("b", 4, arrival=1.0)
    engine.schedule()
    assert waiting(engine) == {"b": WaitReason.TOKEN_BUDGET}


def test_a_step_that_preempts_admits_nobody() -> None:
    engine = ScriptedEngine(num_blocks=5, block_size=4, max_model_len=64)
    engine.add("a", 6, max_tokens=12)
    engine.add("b", 6, max_tokens=12, arrival=1.0)
    while not engine.scheduler.stats().num_preemptions:
        engine.step()
    engine.add("c", 1, arrival=2.0)
    assert waiting(engine) == {"b": WaitReason.PREEMPTION, "c": WaitReason.NEW}
    engine.step()
    assert waiting(engine) == {"b": WaitReason.KV_BLOCKS, "c": WaitReason.BEHIND}
    engine.run()
    engine.check_idle()


class Leaking(PagedKVCacheManager):
    """Refuses more than it promised."""

    def allocate(
        self, request: KVRequest, num_tokens: int, hit: Hit | None = None, num_lookahead: int = 0
    ) -> Allocation | None:
        return None if num_tokens > 8 else super().allocate(request, num_tokens, hit, num_lookahead)

    def allocate_next(self, requests: Sequence[KVRequest]) -> None:
        return None


def test_a_request_that_does_not_fit_although_nothing_runs_ends_with_the_numbers() -> None:
    engine = ScriptedEngine(kv=Leaking(num_blocks=10, block_size=4), block_size=4)
    engine.add("a", 12)
    engine.add("b", 4, max_tokens=2, arrival=1.0)
    engine.run()
    assert engine.ended["a"].reason is FinishReason.ERROR
    assert engine.ended["a"].error == (
        "the request can never run: 12 tokens do not fit although nothing else runs (10 of 10 blocks of 4 tokens are "
        "free)"
    )
    assert len(engine.tokens["b"]) == 2


def test_a_lone_request_that_gets_no_block_ends_with_an_error_instead_of_running_round() -> None:
    engine = ScriptedEngine(kv=Leaking(num_blocks=10, block_size=4), block_size=4, max_num_seqs=1)
    engine.add("a", 6, max_tokens=20)
    engine.add("b", 3, max_tokens=4, arrival=1.0)  # takes the slot in the very step in which "a" gives it up
    engine.run(limit=20)
    assert engine.ended["a"].reason is FinishReason.ERROR
    assert engine.scheduler.stats().num_preemptions == 1
    assert (engine.ended["b"].reason, len(engine.tokens["b"])) == (FinishReason.LENGTH, 4)
    engine.check_idle()


@pytest.mark.parametrize("moment", ["soon", float("nan")])
def test_a_time_that_is_none_is_refused_by_the_policys_name(moment: object) -> None:
    class Wrong(Choosy):
        def wake_at(self, view):  # type: ignore[no-untyped-def]
            return moment

    engine = ScriptedEngine(policy=Wrong())
    with pytest.raises(PluginError, match=r"Wrong returned .* from wake_at"):
        engine.scheduler.wake_at()


def test_a_key_that_is_not_a_number_is_refused() -> None:
    class Wrong(SchedulingPolicy):
        def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
            return float("nan")

    engine = ScriptedEngine(policy=Wrong())
    with pytest.raises(PluginError, match="nan"):
        engine.add("a", 8)
    assert not engine.scheduler.has_requests()


class Counting(Choosy):
    """Counts how often it is asked."""

    num_asked = 0

    def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
        self.num_asked += 1
        return super().admit(request, view)


def test_a_policy_is_not_asked_when_nobody_can_enter() -> None:
    policy = Counting()
    engine = ScriptedEngine(policy=policy, max_num_seqs=1)
    for number in range(50):
        engine.add(f"r{number}", 8)
    engine.step()
    policy.num_asked = 0
    engine.step()
    assert policy.num_asked == 0


def test_whoever_is_not_deferred_enters_however_many_are_before_it() -> None:
    policy = Choosy(deferred=[f"r{number}" for number in range(300)])
    engine = ScriptedEngine(policy=policy, num_blocks=50)
    engine.add("runs", 8, max_tokens=50)
    engine.step()
    for number in range(301):
        engine.add(f"r{number}", 8, arrival=1.0 + number)
    engine.step()
    assert running(engine) == ["runs", "r300"]
    engine.finish("runs", *(f"r{number}" for number in range(301)))
    engine.check_idle()


def test_a_policy_that_fails_at_a_rejection_leaves_no_trace_of_the_request() -> None:
    class Fails(Choosy):
        def on_finish(self, requests, reasons, view):  # type: ignore[no-untyped-def]
            raise ValueError("boom")

    engine = ScriptedEngine(policy=Fails(rejected=["a"]))
    with pytest.raises(PluginError, match="Fails failed in on_finish"):
        engine.add("a", 8)
    assert not engine.scheduler.has_requests()
    assert engine.scheduler.take_finished() == []


def test_a_time_without_end_is_no_time() -> None:
    class Never(Choosy):
        def wake_at(self, view: SchedulerView) -> float | None:
            return float("inf")

    engine = ScriptedEngine(policy=Never())
    engine.add("a", 8, deadline=float("inf"))
    assert engine.scheduler.wake_at() is None
    engine.finish("a")


def test_an_id_whose_end_was_not_told_yet_is_still_in_use() -> None:
    policy = Choosy(rejected=["a"])
    engine = ScriptedEngine(policy=policy)
    engine.add("a", 8)
    policy.rejected = set()
    with pytest.raises(ValidationError, match="in use"):
        engine.add("a", 8)
    engine.scheduler.take_finished()
    engine.add("a", 8)
    engine.finish("a")


def test_a_request_with_very_many_stop_tokens_is_refused() -> None:
    engine = ScriptedEngine()
    with pytest.raises(ValidationError, match="at most 256"):
        engine.add("a", 8, stop_token_ids=list(range(10, 400)))
    assert not engine.scheduler.has_requests()
