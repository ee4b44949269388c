"""`scheduler=priority` with `preempt=true` and without: who runs while somebody more urgent waits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from turn_taking import Job, add, engine_of, play

MODES = ("recompute", "swap", "pause")
DISPLACES = "scheduler.policy.preempt=true"

CALM, URGENT = Job("calm", 20, priority=5), Job("urgent", 4, at=6, priority=0)


@pytest.mark.parametrize("mode", MODES)
def test_a_more_urgent_arrival_displaces_when_that_is_asked_for(mode: str) -> None:
    engine = engine_of("priority", DISPLACES, f"scheduler.preempt_mode={mode}")
    assert play(engine, [CALM, URGENT]).turns == ["calm6", "urgent4", "calm14"]
    assert engine.request("calm").num_preemptions == 1


@pytest.mark.parametrize("mode", MODES)
def test_a_more_urgent_arrival_waits_when_it_is_not(mode: str) -> None:
    engine = engine_of("priority", f"scheduler.preempt_mode={mode}")
    assert play(engine, [CALM, URGENT]).turns == ["calm20", "urgent4"]
    assert engine.stats.num_preemptions == 0


def test_the_least_urgent_of_them_makes_way_and_equals_do_not() -> None:
    jobs = [Job("a", 9, priority=2), Job("b", 9, priority=3), Job("c", 9, priority=3), Job("new", 3, at=2, priority=2)]
    played = play(engine_of("priority", DISPLACES, "scheduler.preempt_mode=pause", places=3), jobs)
    assert played.turns[:3] == ["a+b+c2", "a+b+new3", "a+b+c4"]
    jobs = [Job("a", 9, priority=2), Job("new", 3, at=2, priority=2)]
    assert play(engine_of("priority", DISPLACES), jobs).turns == ["a9", "new3"]


def test_with_ageing_it_is_the_aged_priority_that_counts() -> None:
    """A level is worth 10 seconds: who came 20 seconds before is two levels ahead."""
    ageing = "scheduler.policy.ageing_seconds=10"
    for level, turns in ((2, ["old40", "new2"]), (3, ["old21", "new2", "old19"])):
        jobs = [Job("old", 40, priority=level), Job("new", 2, at=21, priority=0)]
        assert play(engine_of("priority", DISPLACES, ageing, "scheduler.preempt_mode=pause"), jobs).turns == turns


@pytest.mark.parametrize("mode", ["recompute", "pause"])
def test_while_the_engine_lets_nobody_start_nobody_is_displaced_for_who_may_not(mode: str) -> None:
    engine = engine_of("priority", DISPLACES, f"scheduler.preempt_mode={mode}")
    add(engine, Job("calm", 10, priority=5))
    engine.step()
    engine.pause("wait")
    add(engine, Job("urgent", 2, priority=0))
    for _ in range(9):
        engine.step()
    assert (engine.request("calm").finish_reason, engine.waiting) == ("length", ["urgent"])
    assert engine.stats.num_preemptions == 0
    engine.resume()
    engine.run()


# No inversion

Arrival = tuple[int, int, int, int]  # steps before it, priority, prompt, output
ARRIVALS = st.lists(
    st.tuples(st.integers(0, 4), st.integers(0, 3), st.integers(1, 20), st.integers(1, 12)), min_size=2, max_size=14
)
TIGHT = "kv_cache.num_blocks=12"


class Seen(NamedTuple):
    """The priorities of requests in and after one step."""

    entered: list[int]
    went_on: list[int]  # ran in the step before too
    lost: list[int]  # ran in the step before, and have not ended
    stand: list[int]  # in line or paused

    @property
    def ran(self) -> list[int]:
        return self.entered + self.went_on


def steps_of(arrivals: Sequence[Arrival], *overrides: str) -> Iterator[Seen]:
    """Three places; ample blocks and tokens unless the overrides say otherwise."""
    engine = engine_of("priority", "kv_cache.block_size=4", "model.max_model_len=40", *overrides, places=3)
    due = list(accumulate(gap for gap, *_ in arrivals))
    urgency = {f"r{number:02}": row[1] for number, row in enumerate(arrivals)}
    left = [Job(f"r{number:02}", row[3], num_prompt=row[2], priority=row[1]) for number, row in enumerate(arrivals)]
    before: set[str] = set()
    step = 0
    while left or engine.has_requests:
        while left and due[-len(left)] <= step:
            add(engine, left.pop(0))
        engine.step()
        ran = set(engine.scheduled) if engine.last_outputs else set()
        stand = {*engine.waiting, *engine.running} - ran
        groups = (ran - before, ran & before, stand & before, stand)
        yield Seen(*(sorted(urgency[name] for name in group) for group in groups))
        before, step = ran, step + 1
    engine.close()


@settings(max_examples=40, deadline=None)
@given(arrivals=ARRIVALS, mode=st.sampled_from(MODES))
def test_priority_no_inversion_nobody_runs_while_somebody_more_urgent_stands(
    arrivals: list[Arrival], mode: str
) -> None:
    for seen in steps_of(arrivals, DISPLACES, f"scheduler.preempt_mode={mode}"):
        assert not seen.stand or max(seen.ran) <= min(seen.stand), seen


# At step 14 the last one gets the blocks of the paused fourth, which does not take those of the paused fifth in turn.
LOSES_BLOCKS = [(3, 1, 5, 10), (4, 2, 2, 8), (1, 3, 1, 4), (3, 3, 15, 6), (1, 2, 15, 11), (2, 1, 20, 1)]


@settings(max_examples=40, deadline=None)
@given(arrivals=ARRIVALS, mode=st.sampled_from(MODES))
@example(arrivals=LOSES_BLOCKS, mode="pause")
def test_priority_no_inversion_where_blocks_are_short_whoever_loses_a_turn_is_the_least_urgent(
    arrivals: list[Arrival], mode: str
) -> None:
    for seen in steps_of(arrivals, DISPLACES, TIGHT, f"scheduler.preempt_mode={mode}"):
        assert not (seen.lost and seen.went_on) or max(seen.went_on) <= min(seen.lost), seen


@settings(max_examples=40, deadline=None)
@given(arrivals=ARRIVALS, pool=st.sampled_from([(), (TIGHT,)]))
def test_priority_no_inversion_without_displacing_nobody_enters_before_somebody_more_urgent(
    arrivals: list[Arrival], pool: tuple[str, ...]
) -> None:
    for seen in steps_of(arrivals, *pool):
        assert not (seen.entered and seen.stand) or max(seen.entered) <= min(seen.stand), seen
