"""What a scheduler tells of requests between their arrival and their end (plugin API 1.5)."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from scripted_engine import ScriptedEngine
from tokenyard.engine_outputs import EngineCoreOutputs, RequestEventKind
from tokenyard.errors import CapacityError
from tokenyard.interfaces import AdmitDecision, RequestView, SchedulerView, SchedulingPolicy
from tokenyard.testing import EngineHarness

CHUNK, PREEMPTED, RESUMED = RequestEventKind.CHUNK, RequestEventKind.PREEMPTED, RequestEventKind.RESUMED
LOOPS = pytest.mark.parametrize("loop", ["sync", "overlap"])


class Doorkeeper(SchedulingPolicy):
    """Defers and rejects by id."""

    def __init__(self) -> None:
        self.deferred: dict[str, str] = {}
        self.rejected: set[str] = set()

    def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
        if request.request_id in self.rejected:
            return AdmitDecision.reject("no")
        reason = self.deferred.get(request.request_id)
        return AdmitDecision.accept() if reason is None else AdmitDecision.defer(reason)

    def wake_at(self, view: SchedulerView) -> float | None:
        return view.now + 1.0


def run(engine: EngineHarness) -> list[EngineCoreOutputs]:
    outputs = []
    while engine.has_requests:
        outputs.append(engine.step())
    return outputs


def told(outputs: Sequence[EngineCoreOutputs], name: str) -> list[tuple[RequestEventKind, int]]:
    events = [event for one in outputs for event in one.events if event.request_id == name]
    return [(event.kind, event.num_tokens) for event in events]


@LOOPS
def test_each_chunk_of_a_prompt_is_told_once_with_its_tokens_and_decoding_tells_nothing(loop: str) -> None:
    engine = EngineHarness([f"engine={loop}", "scheduler.max_num_batched_tokens=64", "scheduler.max_num_seqs=8"])
    long = engine.add(list(range(150)), max_tokens=9)
    short = engine.add(list(range(300, 310)), max_tokens=9)
    outputs = run(engine)
    assert told(outputs, long) == [(CHUNK, 64), (CHUNK, 64), (CHUNK, 22)]
    assert told(outputs, short) == [(CHUNK, 10)]
    assert sum(len(one.events) for one in outputs) == 4
    assert sum(one.num_scheduled_tokens for one in outputs) == 150 + 10 + 2 * 8
    engine.close()


@LOOPS
def test_a_preemption_is_told_with_its_reason_and_what_it_cost_and_so_is_the_return(loop: str) -> None:
    overrides = ["kv_cache.num_blocks=5", "kv_cache.block_size=4", "model.max_model_len=20", f"engine={loop}"]
    engine = EngineHarness([*overrides, "kv_cache.enable_prefix_caching=false"])
    names = [engine.add([100 * i + j for j in range(6)], max_tokens=12) for i in range(3)]
    outputs = run(engine)
    events = [event for one in outputs for event in one.events]
    preempted = [event for event in events if event.kind is PREEMPTED]
    assert len(preempted) == engine.stats.num_preemptions > 0
    assert {event.reason for event in preempted} == {"kv_blocks"}
    assert all(event.num_tokens > 0 for event in preempted)
    assert len([event for event in events if event.kind is RESUMED]) == len(preempted)
    for name in names:
        kinds = [kind for kind, _ in told(outputs, name) if kind is not CHUNK]
        assert kinds == [PREEMPTED, RESUMED] * (len(kinds) // 2)
        computed = sum(count for kind, count in told(outputs, name) if kind is CHUNK)
        assert computed >= 6
    engine.close()


def test_s23_without_stats_nothing_is_told_and_nothing_kept() -> None:
    engine = EngineHarness(
        ["engine.log_stats=false", "kv_cache.num_blocks=5", "kv_cache.block_size=4", "model.max_model_len=20"]
    )
    for i in range(3):
        engine.add([100 * i + j for j in range(6)], max_tokens=12)
    outputs = run(engine)
    assert all(one.stats is None and not one.events for one in outputs)
    assert engine.core.step().stats is None
    engine.close()


def test_a_deferral_is_told_once_until_its_reason_changes_or_it_is_released() -> None:
    policy = Doorkeeper()
    engine = ScriptedEngine(policy=policy, num_blocks=4)
    engine.add("a", 8, max_tokens=50)
    engine.add("b", 60)
    events = []
    for reason in ("budget", "budget", "quota", None, None, "quota"):
        policy.deferred = {} if reason is None else {"b": reason}
        outputs = engine.step()
        assert outputs is not None
        events += [(event.kind.value, event.reason) for event in outputs.events if event.request_id == "b"]
    told_once = [("deferred", "budget"), ("deferred", "quota"), ("released", None), ("deferred", "quota")]
    assert events == told_once


def test_waiting_requests_are_counted_by_what_they_wait_for() -> None:
    policy = Doorkeeper()
    engine = ScriptedEngine(policy=policy, max_num_seqs=2)
    policy.deferred = {"r0": "not yet", "r2": "not yet"}
    for i in range(6):
        engine.add(f"r{i}", 8, arrival=float(i), max_tokens=5)
    assert engine.scheduler.stats().num_waiting_by_reason == {"new": 6}
    engine.step()
    assert engine.scheduler.stats().num_waiting_by_reason == {"deferred": 2, "max_num_seqs": 2}
    engine.add("late", 8, arrival=9.0)
    assert engine.scheduler.stats().num_waiting_by_reason == {"deferred": 2, "new": 1, "max_num_seqs": 2}
    engine.scheduler.pause_admission(True)
    assert engine.scheduler.stats().num_waiting_by_reason == {"paused": 5}


def test_those_that_will_never_run_are_counted_by_reason_and_a_refusal_leaves_no_trace() -> None:
    policy = Doorkeeper()
    engine = ScriptedEngine(policy=policy, num_blocks=8)
    policy.rejected = {"unwanted"}
    engine.add("unwanted", 8)
    with pytest.raises(CapacityError):
        engine.add("huge", 8 * 16 + 1)
    assert engine.scheduler.stats().num_rejected_by_reason == {"policy": 1}


def test_what_was_scheduled_while_nothing_can_run_is_told_without_a_step() -> None:
    """Otherwise nobody would hear of requests that all wait."""
    engine = EngineHarness(["kv_cache.block_size=4"])
    engine.add([1, 2, 3], max_tokens=3)
    engine.pause("keep")
    outputs = engine.step()
    assert not outputs.did_run
    assert outputs.stats is not None
    assert outputs.stats.num_waiting == 1
    engine.close()
