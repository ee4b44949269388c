"""Several steps in flight at the scheduler itself: what lands when, for whom, and what is free when."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import pytest
from scripted_engine import EOS, ScriptedEngine
from tokenyard.errors import PluginError
from tokenyard.interfaces import (
    Allocation,
    Hit,
    KVRequest,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    StepOutcome,
    WaitReason,
)
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.request import FinishReason
from tokenyard.scheduler.request_state import Request, RequestStatus
from tokenyard.scheduler.slots import SlotTable
from tokenyard.scheduler.waiting import WaitingQueue
from tokenyard.scheduler_output import SchedulerOutput


class Recorder(SchedulingPolicy):
    """Keeps what it is told of each step."""

    def __init__(self) -> None:
        self.outcomes: list[StepOutcome] = []
        self.service: dict[str, int] = {}

    def on_step(self, outcomes: Sequence[StepOutcome], view: SchedulerView) -> None:
        self.outcomes += outcomes
        self.service |= {one.request.request_id: one.request.attained_service for one in outcomes}

    def told(self, request_id: str) -> list[StepOutcome]:
        return [one for one in self.outcomes if one.request.request_id == request_id]


def schedule(engine: ScriptedEngine) -> SchedulerOutput:
    output = engine.schedule()
    assert output is not None
    return output


def until_preemption(engine: ScriptedEngine) -> deque[SchedulerOutput]:
    """Two steps in flight until somebody is preempted; returns the steps in flight then."""
    in_flight = deque([schedule(engine)])
    while not engine.scheduler.stats().num_preemptions:
        in_flight.append(schedule(engine))
        if not engine.scheduler.stats().num_preemptions:
            engine.update(in_flight.popleft())
    return in_flight


def tight(**more: object) -> ScriptedEngine:
    engine = ScriptedEngine(num_blocks=5, block_size=4, max_model_len=64, **more)  # type: ignore[arg-type]
    engine.add("a", 6, max_tokens=12)
    engine.add("b", 6, max_tokens=12, arrival=1.0)
    return engine


def test_a_block_can_be_found_only_when_the_step_that_fills_it_has_landed() -> None:
    engine = ScriptedEngine(block_size=4, prefix_caching=True)
    engine.add("a", 7, max_tokens=9)
    first, second = schedule(engine), schedule(engine)
    engine.update(first)
    assert len(engine.kv.inspect().cached_hashes) == 1
    engine.update(second)
    assert len(engine.kv.inspect().cached_hashes) == 2
    engine.finish("a")


def test_a_preempted_request_that_ends_keeps_its_blocks_until_its_step_has_landed_and_gets_no_token() -> None:
    engine = tight()
    in_flight = until_preemption(engine)
    free, had = engine.kv.usage.num_free_blocks, list(engine.tokens["b"])
    engine.finish("b")
    assert engine.kv.usage.num_free_blocks == free
    engine.update(in_flight.popleft())
    assert engine.kv.usage.num_free_blocks > free
    assert engine.tokens["b"] == had
    while in_flight:
        engine.update(in_flight.popleft())
    engine.run()
    engine.check_idle()


def test_a_preempted_request_gets_the_token_of_its_step_in_flight_and_its_policy_learns_of_it() -> None:
    policy = Recorder()
    engine = tight(policy=policy)
    in_flight = until_preemption(engine)
    had = len(engine.tokens["b"])
    engine.update(in_flight.popleft())
    assert len(engine.tokens["b"]) == had + 1
    assert sum(one.num_new_tokens for one in policy.told("b")) == had + 1
    while in_flight:
        engine.update(in_flight.popleft())
    engine.run()
    assert sum(one.num_new_tokens for one in policy.told("b")) == len(engine.tokens["b"]) == 12
    engine.check_idle()


def test_a_row_that_waits_for_blocks_in_flight_takes_nothing_more_away_and_nobody_is_let_in() -> None:
    engine = ScriptedEngine(num_blocks=4, block_size=4, max_model_len=64)
    for number, name in enumerate("abc"):
        engine.add(name, 4, max_tokens=8, arrival=float(number))
    first, second = schedule(engine), schedule(engine)
    assert engine.scheduled(second) == {"a": 1}  # "c" was preempted for "b", whose block comes when it has landed
    assert engine.scheduler.stats().num_preemptions == 1
    (row,) = engine.scheduler.snapshot().waiting
    assert (row.request_id, row.wait_reason) == ("c", WaitReason.BLOCKS_IN_FLIGHT)
    engine.update(first)
    third = schedule(engine)
    assert engine.scheduled(third) == {"a": 1, "b": 1}
    for output in (second, third):
        engine.update(output)
    engine.run()
    engine.check_idle()


def test_who_waits_for_blocks_of_an_ended_request_is_told_so_and_is_not_stuck() -> None:
    engine = ScriptedEngine(num_blocks=4, block_size=4, max_model_len=64)
    engine.add("a", 12)
    first = schedule(engine)
    engine.finish("a")
    engine.add("b", 8, max_tokens=2)
    assert engine.schedule() is None
    (row,) = engine.scheduler.snapshot().waiting
    assert row.wait_reason is WaitReason.BLOCKS_IN_FLIGHT
    engine.update(first)
    engine.run()
    assert len(engine.tokens["b"]) == 2
    engine.check_idle()


def test_blocks_are_held_until_the_last_of_several_steps_has_landed() -> None:
    engine = ScriptedEngine(num_blocks=8, block_size=4, max_model_len=64)
    engine.add("a", 6, max_tokens=9)
    steps = [schedule(engine) for _ in range(3)]
    engine.finish("a")
    for output in steps:
        assert engine.kv.usage.num_free_blocks < 8
        engine.update(output)
    engine.check_idle()


def test_what_is_in_flight_behind_several_tokens_is_dropped_and_only_that() -> None:
    engine = ScriptedEngine(block_size=4)
    engine.add("a", 6, max_tokens=9)
    first, second = schedule(engine), schedule(engine)
    engine.update(first, {"a": [10, 11]})
    engine.update(second, {"a": [99]})
    assert engine.tokens["a"] == [10, 11]
    engine.run()
    assert len(engine.tokens["a"]) == 9
    # The slot's next owner, preempted, gets the token of its step in flight again.
    assert engine.scheduler._running._dropped == set()  # type: ignore[attr-defined]
    engine.check_idle()


def test_nothing_is_kept_of_a_step_that_has_landed() -> None:
    engine = ScriptedEngine(block_size=4, prefix_caching=True)
    for number in range(5):
        engine.add(f"r{number}", 6 + number, max_tokens=3)
        engine.step()
    engine.run()
    scheduler = engine.scheduler
    assert scheduler._admitted == {}  # type: ignore[attr-defined]
    assert scheduler._steps.num_in_flight == 0  # type: ignore[attr-defined]
    assert scheduler._table.num_with_stop_ids == 0  # type: ignore[attr-defined]
    engine.check_idle()


def test_a_first_step_with_several_tokens_is_the_first_and_all_of_them_count() -> None:
    policy = Recorder()
    engine = ScriptedEngine(policy=policy)
    engine.add("a", 6, max_tokens=5)
    engine.step({"a": [10, 11]})
    engine.step()
    assert [(one.num_new_tokens, one.is_first_token) for one in policy.told("a")] == [(2, True), (1, False)]
    assert engine.scheduler.stats().num_generation_tokens == 3


def test_attained_service_is_what_was_computed_hits_left_out_and_repeats_counted() -> None:
    policy = Recorder()
    engine = ScriptedEngine(policy=policy, block_size=4, prefix_caching=True)
    prompt = list(range(20, 29))
    engine.add("a", prompt, max_tokens=1)
    engine.step()
    engine.add("b", prompt, max_tokens=3)
    engine.step({"b": []})
    assert policy.service == {"a": 9, "b": 1}  # eight tokens were found
    engine.step()
    assert policy.service["b"] == 2  # its last token once more
    engine.run()


def test_the_next_deadline_is_the_moment_to_wake_at() -> None:
    engine = ScriptedEngine()
    engine.add("a", 6, deadline=9.0)
    engine.add("b", 6, deadline=7.0)
    assert engine.scheduler.wake_at() == 7.0
    engine.finish("b")
    assert engine.scheduler.wake_at() == 9.0
    engine.clock.wait(9.0)
    (end,) = engine.scheduler.take_finished()
    assert (end.request_id, end.reason, end.stop_reason) == ("a", FinishReason.ABORT, "deadline")


def record(engine: ScriptedEngine, name: str) -> Request:
    engine.add(name, 4)
    return engine.scheduler._requests[name]  # type: ignore[attr-defined,no-any-return]


def test_a_line_knows_how_many_in_it_have_run_before() -> None:
    engine, line = ScriptedEngine(), WaitingQueue()
    preempted, fresh = record(engine, "a"), record(engine, "b")
    preempted.status = RequestStatus.PREEMPTED
    line.push_front(preempted)
    line.push(fresh, 1)
    assert line.num_started == 1
    line.remove("a")
    assert line.num_started == 0


def test_a_key_that_cannot_be_compared_leaves_no_trace_in_the_line() -> None:
    engine, line = ScriptedEngine(), WaitingQueue()
    for number in (4, 2, 6):
        line.push(record(engine, f"r{number}"), number)
    with pytest.raises(PluginError, match="cannot be compared"):
        line.push(record(engine, "bad"), "high")
    for number in (1, 7, 3, 5, 0, 8):
        line.push(record(engine, f"r{number}"), number)
    assert [request.request_id for request in line] == [f"r{number}" for number in range(9)]


@pytest.mark.parametrize("sampled", [[], [10, 11]])
def test_a_preempted_request_drops_what_builds_on_a_token_that_it_did_not_get(sampled: list[int]) -> None:
    engine = tight()
    in_flight: deque[SchedulerOutput] = deque()
    while not engine.scheduler.stats().num_preemptions:
        in_flight.append(schedule(engine))
        if len(in_flight) == 3 and not engine.scheduler.stats().num_preemptions:
            engine.update(in_flight.popleft())
    had = list(engine.tokens["b"])
    # To the worker the slot has no owner any more.
    engine.update(in_flight.popleft(), {"gone": sampled})
    engine.update(in_flight.popleft(), {"gone": [99]})
    assert engine.tokens["b"] == [*had, *sampled]
    while in_flight:
        engine.update(in_flight.popleft())
    engine.run()
    assert len(engine.tokens["b"]) == 12
    engine.check_idle()


def test_attained_service_counts_a_step_that_landed_after_a_preemption() -> None:
    policy = Recorder()
    engine = tight(policy=policy)
    in_flight = until_preemption(engine)
    while in_flight:
        engine.update(in_flight.popleft())
    engine.run()
    for name in "ab":
        assert policy.service[name] == sum(one.num_computed_tokens for one in policy.told(name))


class Moody:
    """A key that raises what it likes when it is compared."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __lt__(self, other: Moody) -> bool:
        if 7 in (self.value, other.value):
            raise KeyError("bad day")
        return self.value < other.value


def test_a_key_that_raises_leaves_the_line_in_order() -> None:
    engine, line = ScriptedEngine(), WaitingQueue()
    for number in (5, 3, 6, 4):
        line.push(record(engine, f"r{number}"), Moody(number))
    with pytest.raises(PluginError, match="KeyError: 'bad day'"):
        line.push(record(engine, "r7"), Moody(7))
    for number in (2, 1):
        line.push(record(engine, f"r{number}"), Moody(number))
    order = []
    while (first := line.at(0)) is not None:
        order.append(first.request_id)
        line.remove(first.request_id)
    assert order == [f"r{number}" for number in range(1, 7)]


def test_requests_that_left_a_line_do_not_pile_up_in_it() -> None:
    engine, line = ScriptedEngine(), WaitingQueue()
    line.push(record(engine, "first"), 0)
    for number in range(1000):
        line.push(record(engine, f"r{number}"), 1)
        line.remove(f"r{number}")
    assert len(line._line) < 200


def test_a_request_that_fails_in_flight_ends_though_it_waits_again() -> None:
    engine = tight()
    in_flight = until_preemption(engine)
    engine.update(in_flight.popleft(), errors={"b": "not finite"})
    assert (engine.ended["b"].reason, engine.ended["b"].error) == (FinishReason.ERROR, "not finite")
    while in_flight:
        engine.update(in_flight.popleft())
    engine.run()
    engine.check_idle()


def test_a_row_that_fails_at_its_last_token_ends_once_and_with_the_error() -> None:
    engine = ScriptedEngine()
    engine.add("a", 6, max_tokens=1)
    outputs = engine.update(schedule(engine), errors={"a": "not finite"})
    assert [end.reason for end in outputs.finished] == [FinishReason.ERROR]
    engine.check_idle()


def test_a_table_that_grows_has_no_stop_tokens_in_its_new_rows() -> None:
    table = SlotTable(1, 16)
    table._grow()
    assert (table.stop_ids < 0).all()


class Counted(PagedKVCacheManager):
    """Counts calls: the step loop makes them at block edges alone."""

    num_allocates = num_commits = 0

    def allocate(
        self, request: KVRequest, num_tokens: int, hit: Hit | None = None, num_lookahead: int = 0
    ) -> Allocation | None:
        self.num_allocates += 1
        return super().allocate(request, num_tokens, hit, num_lookahead)

    def commit(self, request: KVRequest, num_computed_tokens: int) -> None:
        self.num_commits += 1
        super().commit(request, num_computed_tokens)


def test_the_manager_is_called_at_block_edges_alone() -> None:
    kv = Counted(num_blocks=50, block_size=4)
    engine = ScriptedEngine(kv=kv, block_size=4, prefix_caching=True)
    engine.add("a", 6, max_tokens=21)  # 26 tokens with K/V: seven blocks, six of them full
    engine.run()
    assert (kv.num_allocates, kv.num_commits) == (1 + 5, 6)


def test_a_policy_cannot_end_the_process() -> None:
    class Quits(SchedulingPolicy):
        def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
            raise SystemExit(3)

    engine = ScriptedEngine(policy=Quits())
    with pytest.raises(PluginError, match="Quits failed in waiting_key: SystemExit: 3"):
        engine.add("a", 6)
    assert not engine.scheduler.has_requests()


def test_a_slot_keeps_no_stop_tokens_of_its_last_owner() -> None:
    engine = ScriptedEngine(max_num_seqs=2)
    engine.add("stops", 6, max_tokens=9, stop_token_ids=[42])
    engine.step()
    engine.finish("stops")
    engine.add("goes on", 6, max_tokens=9, ignore_eos=True)
    engine.add("stops too", 6, max_tokens=9, arrival=1.0)  # so that stop tokens are looked for at all
    engine.step()
    engine.step({"goes on": [42]})
    assert "goes on" not in engine.ended
    engine.run()
    assert len(engine.tokens["goes on"]) == 9
    engine.check_idle()


@pytest.mark.parametrize(
    ("sampled", "kept"), [([11, EOS], [11, EOS]), ([EOS, 11], [EOS, 11]), ([11, EOS, 12], [11, EOS])]
)
def test_of_several_tokens_the_min_tokens_th_is_the_first_that_may_stop(sampled: list[int], kept: list[int]) -> None:
    engine = ScriptedEngine()
    engine.add("a", 6, max_tokens=9, min_tokens=2)
    engine.step({"a": sampled})
    assert engine.tokens["a"] == kept
    assert ("a" in engine.ended) is (kept[-1] == EOS)
    engine.run()
    engine.check_idle()
