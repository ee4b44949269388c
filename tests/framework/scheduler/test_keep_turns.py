"""`keep_turns`: whoever loses its turn loses it to somebody who enters in that step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pytest
from tokenyard import PolicyDescriptor
from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView, SchedulingPolicy, keep_turns
from tokenyard.testing import EngineHarness, catalogue_with


class Numbered(SchedulingPolicy):
    """The smallest priority runs; an odd priority never loses its turn."""

    def __init__(self, options: object, context: PolicyContext) -> None:
        self._context = context

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return (request.priority,)

    def requeue_key(self, request: RequestView, view: SchedulerView) -> object:
        return (request.priority,)

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return keep_turns(
            running, view, self._context, lambda one: (one.priority,), may_lose=lambda one: one.priority % 2 == 0
        )


def engine_of(*overrides: str, places: int = 4, num_blocks: int = 20) -> EngineHarness:
    descriptor = PolicyDescriptor(name="numbered", api_version=(1, 7), factory=Numbered)
    return EngineHarness(
        [
            "scheduler=numbered",
            f"scheduler.max_num_seqs={places}",
            f"kv_cache.num_blocks={num_blocks}",
            "kv_cache.block_size=4",
            "kv_cache.enable_prefix_caching=false",
            "model.max_model_len=80",
            *overrides,
        ],
        catalogue=catalogue_with(descriptor),
    )


@dataclass(frozen=True)
class Situation:
    """What runs, by priority and prompt, and what then comes."""

    running: Mapping[str, tuple[int, int]]
    waiting: Mapping[str, tuple[int, int]]

    def run(self, engine: EngineHarness, num_steps: int = 1) -> set[str]:
        """Who runs, without those that lost their turn, so many steps after the others have come."""
        for requests, steps in ((self.running, 1), (self.waiting, num_steps)):
            for name, (priority, num_prompt) in requests.items():
                number = 1000 * len(engine.requests)
                engine.add(range(number, number + num_prompt), name, priority=priority, max_tokens=30)
            for _ in range(steps):
                engine.step()
        ran = set(engine.scheduled)
        engine.close()
        return ran


MODES = pytest.mark.parametrize("mode", ["recompute", "pause"])


@MODES
def test_a_full_batch_gives_a_place_to_each_that_is_better(mode: str) -> None:
    case = Situation({"a": (2, 4), "b": (4, 4), "c": (6, 4)}, {"x": (0, 4), "y": (2, 4), "z": (5, 4)})
    assert case.run(engine_of(f"scheduler.preempt_mode={mode}", places=3)) == {"a", "x", "y"}


@MODES
def test_what_may_not_lose_its_turn_keeps_it(mode: str) -> None:
    case = Situation({"a": (7, 4), "b": (4, 4)}, {"x": (0, 4), "y": (2, 4)})
    assert case.run(engine_of(f"scheduler.preempt_mode={mode}", places=2)) == {"a", "x"}


@MODES
def test_several_make_way_for_one_that_needs_their_blocks(mode: str) -> None:
    """20 blocks, of which three times five are held: 17 for the newcomer are free when the two worst give theirs."""
    case = Situation({"a": (2, 19), "b": (4, 19), "c": (6, 19)}, {"x": (0, 57)})
    assert case.run(engine_of(f"scheduler.preempt_mode={mode}")) == {"a", "x"}


@MODES
def test_nobody_makes_way_for_one_whose_blocks_cannot_be_had(mode: str) -> None:
    """12 of 20 are free without the two worse ones, since the best one needs its eighth in that step; 13 are needed."""
    case = Situation({"a": (0, 28), "b": (4, 4), "c": (6, 4)}, {"x": (2, 52)})
    assert case.run(engine_of(f"scheduler.preempt_mode={mode}", places=3), 2) == {"a", "b", "c"}


@MODES
def test_nobody_makes_way_for_one_that_finds_no_tokens_in_the_step(mode: str) -> None:
    """Of eight tokens the prefill of the best takes seven, or all: in its last step it leaves one at last."""

    def last_step_of_the_worse_one(*overrides: str) -> int:
        engine = engine_of(
            f"scheduler.preempt_mode={mode}", "scheduler.max_num_batched_tokens=8", *overrides, places=2, num_blocks=40
        )
        for name, priority, num_prompt in (("worse", 4, 1), ("best", 0, 70), ("new", 2, 4)):
            number = 1000 * len(engine.requests)
            engine.add(range(number, number + num_prompt), name, priority=priority, max_tokens=10)
            if name != "new":
                engine.step()
        for step in range(50):
            engine.step()
            if "worse" not in engine.scheduled:
                assert engine.scheduled.keys() == {"best", "new"}
                return step
        raise AssertionError("the new one never entered")

    assert last_step_of_the_worse_one() == 8
    assert last_step_of_the_worse_one("scheduler.long_prefill_token_threshold=4") == 0


def test_where_prompts_are_not_cut_nobody_makes_way_for_one_that_does_not_fit_the_step() -> None:
    """Of eight tokens the two that are better take two."""

    def ran(num_prompt: int) -> set[str]:
        whole = ("scheduler.enable_chunked_prefill=false", "scheduler.max_num_batched_tokens=8")
        engine = engine_of(*whole, "model.max_model_len=8", places=3)
        return Situation({"a": (0, 2), "b": (0, 2), "c": (4, 2)}, {"x": (2, num_prompt)}).run(engine)

    assert ran(7) == {"a", "b", "c"}
    assert ran(6) == {"a", "b", "x"}


def test_a_hit_needs_no_blocks_of_others() -> None:
    """Nine of its ten blocks are the other's too: the place that is free is enough, and nobody makes way."""
    engine = engine_of("kv_cache.enable_prefix_caching=true", num_blocks=17)
    engine.add(range(40), "a", priority=0, max_tokens=10)
    engine.add(range(500, 512), "b", priority=4, max_tokens=10)
    engine.step()
    engine.add(range(40), "x", priority=2, max_tokens=10)
    engine.step()
    assert set(engine.scheduled) == {"a", "b", "x"}
    engine.run()


@MODES
@pytest.mark.parametrize(("num_prompt", "enters"), [(28, True), (29, False)])
def test_cached_blocks_that_nobody_holds_are_free_or_a_hit_but_not_both(
    mode: str, num_prompt: int, enters: bool
) -> None:
    """Ten blocks, four cached: without the three of the one that keeps its turn seven can be had, for 28 tokens."""
    engine = engine_of(f"scheduler.preempt_mode={mode}", "kv_cache.enable_prefix_caching=true", places=2, num_blocks=10)
    engine.add(range(17), "cached", max_tokens=1)  # four whole blocks stay in the cache
    engine.run()
    engine.add(range(500, 510), "keeps", priority=0, max_tokens=10)
    engine.add(range(600, 605), "loses", priority=4, max_tokens=10)
    engine.step()
    engine.add([*range(16), *range(700, 700 + num_prompt - 16)], "x", priority=2, max_tokens=1)
    engine.step()
    assert set(engine.scheduled) == ({"keeps", "x"} if enters else {"keeps", "loses"})
    engine.run()


@MODES
@pytest.mark.parametrize(("num_prompt", "enters"), [(28, True), (29, False)])
def test_blocks_shared_with_the_one_that_loses_its_turn_are_needed_then(
    mode: str, num_prompt: int, enters: bool
) -> None:
    """Ten blocks, three of which are `keeps`'s: seven can be had, whether or not `loses` holds some of the hit."""
    engine = engine_of(f"scheduler.preempt_mode={mode}", "kv_cache.enable_prefix_caching=true", places=2, num_blocks=10)
    engine.add(range(500, 510), "keeps", priority=0, max_tokens=10)
    engine.add(range(18), "loses", priority=4, max_tokens=10)
    engine.step()
    engine.add([*range(16), *range(700, 700 + num_prompt - 16)], "x", priority=2, max_tokens=1)
    engine.step()
    assert set(engine.scheduled) == ({"keeps", "x"} if enters else {"keeps", "loses"})
    engine.run()


@MODES
def test_what_is_shared_with_others_is_not_asked_for_twice(mode: str) -> None:
    """Ten blocks: four are shared by all, three more the paused one's: its three and the two that are free are enough.

    What the request needs is worked out alike for `keep_turns` and where blocks of paused requests are taken.
    """
    engine = engine_of(f"scheduler.preempt_mode={mode}", "kv_cache.enable_prefix_caching=true", places=2, num_blocks=10)
    engine.add([*range(16), 100], "keeps", priority=0, max_tokens=20)
    engine.step()
    engine.add([*range(16), *range(200, 210)], "loses", priority=4, max_tokens=20)
    engine.step()
    engine.add([*range(16), *range(300, 314)], "x", priority=2, max_tokens=2)
    engine.step()
    assert set(engine.scheduled) == {"keeps", "x"}
    engine.run()


def test_nothing_is_ranked_where_nobody_could_be_displaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise AssertionError("somebody was ranked")

    monkeypatch.setattr("tokenyard.interfaces.turns._Kept", fail)
    case = Situation({"a": (1, 4), "b": (3, 4)}, {"x": (2, 4)})  # odd ones keep their turns
    assert case.run(engine_of(places=2), 3) == {"a", "b"}


@MODES
def test_what_was_displaced_goes_on_before_others_of_its_kind(mode: str) -> None:
    engine = engine_of(f"scheduler.preempt_mode={mode}", places=1)
    engine.add([1], "calm", priority=4, max_tokens=9)
    engine.step()
    engine.add([2], "urgent", priority=0, max_tokens=2)
    engine.add([3], "equal", priority=4, max_tokens=9, arrival=1.0)
    order = []
    while engine.has_requests:
        engine.step()
        order += [name for name in engine.scheduled if name not in order[-1:]]
    assert order == ["urgent", "calm", "equal"]
