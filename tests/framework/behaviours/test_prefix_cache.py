"""Section 4 of the public engine behaviours through the whole engine; the manager's own tests have the rest."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenyard import ObserverDescriptor
from tokenyard.config import NoOptions
from tokenyard.engine_outputs import EngineCoreOutputs
from tokenyard.interfaces import Observer, ObserverContext
from tokenyard.kv_events import BlockRemoved, BlockStored, CacheCleared, KVEvent
from tokenyard.scheduler_output import SchedulerOutput
from tokenyard.testing import EngineHarness, catalogue_with

MakeHarness = Callable[..., EngineHarness]

LOOPS = pytest.mark.parametrize("loop", ["sync", "overlap"])
CACHED = ["kv_cache.enable_prefix_caching=true", "kv_cache.num_blocks=10", "kv_cache.block_size=16"]
COMMON = list(range(100, 148))  # 48 tokens: three blocks


def test_k1_k2_k6_a_running_requests_blocks_are_shared(harness: MakeHarness) -> None:
    engine = harness(*CACHED)
    first = engine.add([*COMMON, *range(900, 907)])
    engine.step()
    assert (engine.request(first).num_cached, engine.blocks(first)) == (0, [1, 2, 3, 4])
    assert len(engine.kv.cached_hashes) == 3  # the fourth block is not full
    second = engine.add([*COMMON, *range(800, 807)])
    engine.step()
    assert (engine.request(second).num_cached, engine.blocks(second)) == (48, [1, 2, 3, 5])
    assert [engine.kv.ref_counts[block] for block in (1, 2, 3, 4, 5)] == [2, 2, 2, 1, 1]
    assert engine.kv.num_free == 5
    while len(engine.blocks(first)) == 4:
        held = engine.request(first).num_computed
        engine.step()
    assert held == 64  # the next block is taken when the 65th token is written, not before
    assert engine.blocks(first) == [1, 2, 3, 4, 6]
    assert len(engine.kv.cached_hashes) == 5  # and the fourth block of each: prompt and generated tokens


def test_k7_the_longest_unused_block_goes_first(harness: MakeHarness) -> None:
    engine = harness(*CACHED)
    engine.add(list(range(100, 190)), max_tokens=1)  # five full blocks and a part
    engine.add(list(range(300, 348)), max_tokens=1)
    engine.run()
    late = engine.add([*range(100, 132), *range(700, 705)], max_tokens=1)
    engine.step()
    assert engine.request(late).num_cached == 32
    engine.check_idle()


@LOOPS
@pytest.mark.parametrize("length", [16, 32, 48])
def test_k14_kv_01_the_last_block_of_a_cached_prompt_is_computed_again(
    harness: MakeHarness, loop: str, length: int
) -> None:
    engine = harness(*CACHED, f"engine={loop}")
    outputs = []
    for _ in range(2):
        name = engine.add(COMMON[:length], request_id="same", max_tokens=4)
        engine.run()
        outputs.append(list(engine.request(name).output_token_ids))
    assert engine.request("same").num_cached == length - 16
    assert outputs[0] == outputs[1]


@LOOPS
def test_kv_02_hits_of_a_repeated_and_an_extended_prompt(harness: MakeHarness, loop: str) -> None:
    engine = harness(*CACHED, f"engine={loop}")
    hits = []
    for prompt in (COMMON, COMMON, COMMON, [*COMMON, *range(500, 516)]):
        name = engine.add(prompt, max_tokens=1)
        engine.run()
        hits.append(engine.request(name).num_cached)
    assert hits == [0, 32, 32, 48]


def test_k15_a_reset_waits_for_the_requests(harness: MakeHarness) -> None:
    engine = harness(*CACHED, "engine=overlap")
    name = engine.add(COMMON)
    engine.step()
    assert not engine.reset_prefix_cache()
    engine.finish(name)
    assert not engine.reset_prefix_cache()  # a step in flight still writes to its blocks
    engine.step()
    assert engine.kv.cached_hashes
    assert engine.reset_prefix_cache()
    assert engine.kv.cached_hashes == frozenset()
    again = engine.add(COMMON)
    engine.step()
    assert engine.request(again).num_cached == 0


@LOOPS
def test_k22_a_follow_up_hits_prompt_and_output(harness: MakeHarness, loop: str) -> None:
    engine = harness(*CACHED, f"engine={loop}")
    name = engine.add(COMMON[:20], max_tokens=29)
    engine.run()
    turn = [*COMMON[:20], *engine.request(name).output_token_ids]
    follow = engine.add([*turn, 7, 8, 9], max_tokens=1)
    engine.run()
    assert engine.request(follow).num_cached == 48


@LOOPS
def test_k24_salts_separate_tenants(harness: MakeHarness, loop: str) -> None:
    engine = harness(*CACHED, f"engine={loop}")
    hits = []
    for salt in (None, "alice", "alice", "bob", None):
        name = engine.add(COMMON, cache_salt=salt, max_tokens=1)
        engine.run()
        hits.append(engine.request(name).num_cached)
    assert hits == [0, 0, 32, 0, 32]


class Router(Observer):
    """Keeps what a cache-aware router would be told."""

    wants_kv_events = True

    def __init__(self) -> None:
        self.events: list[KVEvent] = []

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        self.events += result.kv_events


@pytest.fixture
def router() -> Router:
    return Router()


def observed(router: Router) -> ObserverDescriptor[NoOptions]:
    def make(options: NoOptions, context: ObserverContext) -> Observer:
        return router

    return ObserverDescriptor(name="router", api_version=(1, 3), factory=make)


@LOOPS
def test_k23_an_observer_learns_what_the_cache_holds(harness: MakeHarness, router: Router, loop: str) -> None:
    engine = harness(*CACHED, "observers=[router]", f"engine={loop}", catalogue=catalogue_with(observed(router)))
    engine.add(COMMON, max_tokens=1)
    engine.run()
    stored = [event for event in router.events if isinstance(event, BlockStored)]
    assert [event.token_ids for event in stored] == [tuple(COMMON[i : i + 16]) for i in (0, 16, 32)]
    assert [event.parent_hash for event in stored] == [None, stored[0].block_hash, stored[1].block_hash]
    assert {event.block_size for event in stored} == {16}
    assert {event.block_hash for event in stored} == engine.kv.cached_hashes
    engine.add(list(range(1000, 1150)), max_tokens=1)  # ten blocks: the three are evicted
    engine.run()
    removed = [event.block_hash for event in router.events if isinstance(event, BlockRemoved)]
    assert set(removed) == {event.block_hash for event in stored}
    assert engine.reset_prefix_cache()
    engine.add([1], max_tokens=1)
    engine.run()
    assert CacheCleared() in router.events


def test_k23_nobody_who_asks_nothing_recorded(harness: MakeHarness) -> None:
    engine = harness(*CACHED)
    engine.add(COMMON, max_tokens=1)
    assert engine.step().kv_events == ()


@LOOPS
def test_what_a_failed_step_computed_is_never_shared(harness: MakeHarness, loop: str) -> None:
    engine = harness(*CACHED, f"engine={loop}")
    name = engine.add(COMMON)
    engine.step(errors={name: "its logits are not finite"})
    assert engine.request(name).finish_reason == "error"
    assert engine.kv.cached_hashes == frozenset()
