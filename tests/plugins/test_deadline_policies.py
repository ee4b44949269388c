"""edf and scorpio: deadlines met, service levels kept, and what cannot be kept refused."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.errors import ConfigError
from tokenyard.request import FinishReason, ServiceLevel
from tokenyard.testing import EngineHarness, PolicyContract

LINEAR = ("latency=linear", "latency.per_step=0.01", "latency.per_token=0.001")
CONSTANT = ("latency=constant", "latency.per_step=1.0")


class TestEDF(PolicyContract):
    overrides = ("scheduler=edf",)
    max_examples = 3


class TestEDFWithEverything(PolicyContract):
    overrides = (
        "scheduler=edf",
        "scheduler.policy.preempt=true",
        "scheduler.policy.drop_late=true",
        "scheduler.policy.default_seconds=60",
        "scheduler.preempt_mode=pause",
        *LINEAR,
    )
    max_examples = 3


class TestScorpio(PolicyContract):
    overrides = ("scheduler=scorpio", *LINEAR)
    max_examples = 3


def one_at_a_time(*overrides: str, preempt_mode: str = "pause", step_seconds: float = 1.0) -> EngineHarness:
    """A batch of one, where each step gives one token."""
    fixed = ("scheduler=edf", "scheduler.max_num_seqs=1", f"scheduler.preempt_mode={preempt_mode}")
    return EngineHarness([*fixed, *overrides], step_seconds=step_seconds)


# Earliest deadline first


@dataclass(frozen=True, kw_only=True)
class Job:
    arrival: int
    length: int
    due: int


def feasible(seed: int, count: int) -> list[Job]:
    """Due when they end in a schedule of random turns, each of one step."""
    draw = Random(seed)
    arrivals = [draw.randrange(3 * count) for _ in range(count)]
    lengths = [draw.randint(1, 6) for _ in range(count)]
    left, ends, now = list(lengths), [0] * count, 0
    while any(left):
        if ready := [number for number in range(count) if arrivals[number] <= now and left[number]]:
            number = draw.choice(ready)
            left[number] -= 1
            ends[number] = now + 1
        now += 1
    return [Job(arrival=arrivals[number], length=lengths[number], due=ends[number]) for number in range(count)]


def num_late(jobs: Sequence[Job], *overrides: str, preempt_mode: str = "pause") -> int:
    coming = sorted(enumerate(jobs), key=lambda one: -one[1].arrival)
    ended: dict[str, float] = {}
    with one_at_a_time(*overrides, preempt_mode=preempt_mode) as engine:
        while coming or engine.has_requests:
            while coming and coming[-1][1].arrival <= engine.clock.now():
                number, job = coming.pop()
                level = ServiceLevel(e2e=job.due - job.arrival)
                engine.add(range(4), str(number), max_tokens=job.length, ignore_eos=True, service_level=level)
            if engine.has_requests:
                ended |= {end.request_id: engine.clock.now() for end in engine.step().finished}
            else:
                engine.advance(1)
    assert len(ended) == len(jobs)
    return sum(ended[str(number)] > job.due for number, job in enumerate(jobs))


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 2**32), st.integers(4, 12))
def test_edf_with_preemption_misses_no_deadline_of_a_feasible_schedule(seed: int, count: int) -> None:
    assert num_late(feasible(seed, count), "scheduler.policy.preempt=true") == 0


def test_edf_other_orders_do_miss_them() -> None:
    sets = [feasible(seed, 12) for seed in range(2)]
    assert sum(num_late(jobs, "scheduler=fcfs") for jobs in sets) > 5
    assert sum(num_late(jobs) for jobs in sets) > 0  # without preemption what runs is not stopped


def test_edf_goes_by_the_earliest_of_deadline_and_service_level_then_by_arrival() -> None:
    with one_at_a_time() as engine:
        levels: dict[str, dict[str, object]] = {
            "running": {},
            "nothing": {},
            "deadline": {"deadline": 50.0},
            "e2e": {"service_level": ServiceLevel(e2e=40.0)},
            "ttft": {"service_level": ServiceLevel(ttft=30.0, e2e=90.0)},
            "both": {"deadline": 20.0, "service_level": ServiceLevel(e2e=60.0)},
            "nothing too": {},
        }
        for name, told in levels.items():
            engine.add(range(4), name, max_tokens=2, **told)  # type: ignore[arg-type]
            if name == "running":
                engine.step()
        order: list[str] = []
        while engine.has_requests:
            order += [one.request_id for one in engine.step().admitted]
    assert order == ["both", "ttft", "e2e", "deadline", "nothing", "nothing too"]


def test_edf_without_preemption_displaces_nobody_and_with_it_does() -> None:
    for preempt, order in ((False, ["late", "soon"]), (True, ["soon", "late"])):
        with one_at_a_time(f"scheduler.policy.preempt={preempt}") as engine:
            engine.add(range(4), "late", max_tokens=5, service_level=ServiceLevel(e2e=100))
            engine.step()
            engine.add(range(4), "soon", max_tokens=5, service_level=ServiceLevel(e2e=10))
            ended: list[str] = []
            while engine.has_requests:
                ended += [end.request_id for end in engine.step().finished]
        assert ended == order


def test_edf_blocks_are_taken_from_who_is_due_last() -> None:
    overrides = ("scheduler=edf", "kv_cache.num_blocks=6", "kv_cache.block_size=4", "scheduler.max_num_seqs=3")
    with EngineHarness(overrides) as engine:
        for name, seconds in (("first", 300.0), ("second", 900.0), ("third", 500.0)):
            engine.add(range(7), name, max_tokens=8, ignore_eos=True, service_level=ServiceLevel(e2e=seconds))
        engine.run()
        assert engine.request("second").num_preemptions
        assert not engine.request("first").num_preemptions


def test_edf_drops_what_cannot_be_in_time_alone_and_says_why() -> None:
    # A prompt is a step of 1 s, and so is each token after the first.
    overrides = ("scheduler.policy.drop_late=true", "scheduler.predictor=max_tokens", *CONSTANT)
    with one_at_a_time(*overrides) as engine:
        engine.add(range(4), "possible", max_tokens=5, service_level=ServiceLevel(e2e=5.0))
        engine.add(range(4), "hopeless", max_tokens=5, service_level=ServiceLevel(e2e=4.9))
        engine.add(range(4), "no first", max_tokens=5, service_level=ServiceLevel(ttft=0.9))
        engine.add(range(4), "says nothing", max_tokens=5)
        engine.run()
        reasons = {name: record.finish_reason for name, record in engine.requests.items()}
        error = engine.request("hopeless").error
    refused = [name for name, reason in reasons.items() if reason is FinishReason.ERROR]
    assert refused == ["hopeless", "no first"]
    assert error is not None
    assert "its last token is due in 4.9 s, alone takes 5 s" in error


def test_edf_drops_in_line_what_has_become_hopeless_but_never_what_has_run() -> None:
    with one_at_a_time("scheduler.policy.drop_late=true", "scheduler.policy.preempt=true", *CONSTANT) as engine:
        engine.add(range(4), "first", max_tokens=6, service_level=ServiceLevel(e2e=6.5))
        engine.add(range(4), "second", max_tokens=5, service_level=ServiceLevel(e2e=7.0))
        engine.step()
        # It is done at 3, so the first, which has run, ends late.
        engine.add(range(4), "third", max_tokens=2, service_level=ServiceLevel(e2e=3.0))
        engine.run()
        reasons = {name: record.finish_reason for name, record in engine.requests.items()}
    assert reasons == {"first": FinishReason.LENGTH, "second": FinishReason.ERROR, "third": FinishReason.LENGTH}


def test_edf_a_default_is_an_order_and_ends_starvation_but_drops_nobody() -> None:
    overrides = ("scheduler.policy.default_seconds=2", "scheduler.policy.drop_late=true", *CONSTANT)
    with one_at_a_time(*overrides) as engine:
        engine.add(range(4), "running", max_tokens=3)
        engine.step()
        engine.add(range(4), "says nothing", max_tokens=9)
        engine.add(range(4), "in 20 s", max_tokens=3, service_level=ServiceLevel(e2e=20))
        assert engine.waiting == ["says nothing", "in 20 s"]
        engine.run()
        assert {record.finish_reason for record in engine.requests.values()} == {FinishReason.LENGTH}


def test_edf_without_a_latency_model_drop_late_is_refused_with_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"drop_late=true .* set latency=linear or latency=constant"):
        one_at_a_time("scheduler.policy.drop_late=true")


@pytest.mark.parametrize("seconds", ["0", "-1", "inf", "nan"])
def test_edf_a_default_that_is_no_time_is_refused(seconds: str) -> None:
    with pytest.raises(ConfigError, match="default_seconds"):
        one_at_a_time(f"scheduler.policy.default_seconds={seconds}")


# SCORPIO


def guarded(*overrides: str, max_num_seqs: int = 16) -> EngineHarness:
    """A step takes 10 ms and 1 ms a token."""
    return EngineHarness(["scheduler=scorpio", *LINEAR, f"scheduler.max_num_seqs={max_num_seqs}", *overrides])


def test_scorpio_the_earliest_first_token_is_due_first_and_requests_without_a_level_come_last() -> None:
    with guarded(max_num_seqs=1) as engine:
        engine.add(range(4), "none", max_tokens=2)
        for name, seconds in (("c", 3.0), ("a", 1.0), ("b", 2.0)):
            engine.add(range(4), name, max_tokens=2, service_level=ServiceLevel(ttft=seconds))
        assert engine.waiting == ["a", "b", "c", "none"]


def test_scorpio_lets_in_as_many_as_a_step_within_the_tightest_level_has_room_for() -> None:
    # 10 ms and 1 ms each: seven decodes take 17 ms, eight would take 18 ms.
    with guarded() as engine:
        for _ in range(12):
            engine.add(range(4), max_tokens=50, ignore_eos=True, service_level=ServiceLevel(tpot=0.0175))
        sizes = []
        for _ in range(20):
            engine.step()
            sizes.append(len(engine.running))
        assert sizes[-1] == max(sizes) == 7


def test_scorpio_whoever_is_looser_enters_where_the_tighter_one_would_not() -> None:
    with guarded() as engine:
        for _ in range(6):
            engine.add(range(4), max_tokens=50, ignore_eos=True)
        engine.step()
        engine.add(range(4), "tight", max_tokens=4, service_level=ServiceLevel(tpot=0.0165))  # with it there are 7
        engine.add(range(4), "loose", max_tokens=4, service_level=ServiceLevel(tpot=0.0175))
        engine.step()
        assert "loose" in engine.running
        assert engine.waiting == ["tight"]
        snapshot = engine.scheduler.snapshot().waiting[0]
        assert snapshot.wait_detail is not None
        assert "tightest slo.tpot" in snapshot.wait_detail


def test_scorpio_a_long_prompt_comes_in_chunks_that_keep_the_tightest_level() -> None:
    with guarded() as engine:
        engine.add(range(4), "talks", max_tokens=60, ignore_eos=True, service_level=ServiceLevel(tpot=0.030))
        engine.step()
        engine.add(range(100), "reads", max_tokens=2)
        chunks = []
        for _ in range(7):
            engine.step()
            chunks.append(engine.scheduled.get("reads", 0))
    # 30 ms have room for 20 tokens, one of them the decode's.
    assert chunks == [19, 19, 19, 19, 19, 5, 1]


def test_scorpio_rejects_what_cannot_be_kept_even_alone() -> None:
    with guarded() as engine:
        engine.add(range(91), "slow first", max_tokens=2, service_level=ServiceLevel(ttft=0.1))  # takes 101 ms
        engine.add(range(90), "just", max_tokens=2, service_level=ServiceLevel(ttft=0.1))
        engine.add(range(4), "too fast", max_tokens=2, service_level=ServiceLevel(tpot=0.0109))
        engine.add(range(4), "fast", max_tokens=2, service_level=ServiceLevel(tpot=0.0111))
        engine.run()
        errors = {name: record.error for name, record in engine.requests.items() if record.error}
    assert list(errors) == ["slow first", "too fast"]
    assert "first token takes 0.101 s alone, and is due in 0.1 s" in errors["slow first"]
    assert "each token after it takes 0.011 s alone, and is due in 0.0109 s" in errors["too fast"]


def test_scorpio_may_be_told_to_reject_nobody() -> None:
    with guarded("scheduler.policy.reject=false") as engine:
        engine.add(range(400), max_tokens=2, service_level=ServiceLevel(ttft=0.1, tpot=0.0001))
        engine.add(range(400), max_tokens=2, service_level=ServiceLevel(ttft=0.1, tpot=0.0001))
        engine.run()
        assert {record.finish_reason for record in engine.requests.values()} == {FinishReason.LENGTH}


def test_scorpio_without_a_latency_model_is_refused_with_what_to_set() -> None:
    with pytest.raises(ConfigError, match=r"policy scorpio .* set latency=linear or latency=constant"):
        EngineHarness(["scheduler=scorpio"])
