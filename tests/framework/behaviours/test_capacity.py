"""Faults of the kinds SCH-* and KV-*, under both loops: capacity, preemption, chunks, aborts, and work conservation."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.errors import CapacityError
from tokenyard.interfaces import WaitReason
from tokenyard.testing import EngineHarness

MakeHarness = Callable[..., EngineHarness]

LOOPS = pytest.mark.parametrize("loop", ["sync", "overlap"])
CACHED_32 = [
    "kv_cache.enable_prefix_caching=true",
    "kv_cache.num_blocks=8",
    "kv_cache.block_size=4",
    "model.max_model_len=32",
]
POOL_128 = ["kv_cache.num_blocks=8", "kv_cache.block_size=16", "model.max_model_len=512"]


@LOOPS
def test_sch_01_a_prompt_larger_than_the_pool_is_refused_and_others_run(harness: MakeHarness, loop: str) -> None:
    engine = harness(*POOL_128, f"engine={loop}")
    with pytest.raises(CapacityError, match=r"200 tokens.*128"):
        engine.add([5] * 200, request_id="A")
    engine.add([6] * 10, request_id="B", max_tokens=4)
    engine.run(limit=100)
    assert len(engine.request("B").output_token_ids) == 4
    engine.check_idle()


def test_k18_a_prompt_larger_than_the_pool_is_refused_even_if_its_first_chunk_fits(harness: MakeHarness) -> None:
    engine = harness("kv_cache.num_blocks=5", "scheduler.max_num_batched_tokens=32", "model.max_model_len=512")
    with pytest.raises(CapacityError):
        engine.add([5] * 256)
    assert not engine.has_requests


@LOOPS
def test_sch_02_a_lone_request_ends_where_the_pool_ends(harness: MakeHarness, loop: str) -> None:
    engine = harness(*POOL_128, "scheduler.max_num_batched_tokens=32", f"engine={loop}")
    with pytest.raises(CapacityError):
        engine.add([5] * 140)
    name = engine.add([5] * 100, max_tokens=100, ignore_eos=True)
    engine.run(limit=200)
    request = engine.request(name)
    assert (request.finish_reason, request.num_preemptions) == ("length", 0)
    assert len(request.output_token_ids) == 29  # 128 tokens have K/V; the last one needs none
    engine.check_idle()


@LOOPS
@pytest.mark.parametrize("threshold", [0, 48])
def test_sch_08_a_long_prompt_leaves_room_only_under_a_chunk_cap(
    harness: MakeHarness, loop: str, threshold: int
) -> None:
    """Without a cap a prompt takes the whole budget until it is done (documented); decodes never starve."""
    engine = harness(
        "scheduler.max_num_batched_tokens=64", f"scheduler.long_prefill_token_threshold={threshold}", f"engine={loop}"
    )
    decode = engine.add([9] * 4, max_tokens=200)
    while not engine.request(decode).output_token_ids:
        engine.step()
    engine.add([5] * 2000, request_id="A", max_tokens=1)
    engine.step()
    engine.add([6] * 8, request_id="B", max_tokens=1)
    before, steps = len(engine.request(decode).output_token_ids), 0
    while not engine.request("B").output_token_ids:
        engine.step()
        steps += 1
    assert len(engine.request(decode).output_token_ids) == before + steps
    assert steps <= 3 if threshold else steps >= 30


@LOOPS
def test_sch_09_a_hit_of_a_failed_admission_is_looked_up_anew(harness: MakeHarness, loop: str) -> None:
    engine = harness(*CACHED_32, f"engine={loop}")
    seed = list(range(100, 116))
    engine.add(seed, max_tokens=1)
    engine.run()
    filler = engine.add(list(range(300, 316)), max_tokens=13)
    engine.step()
    late = engine.add([*seed, *range(900, 908)], max_tokens=4)
    engine.step()
    assert engine.request(late).wait_reason in (WaitReason.KV_BLOCKS, WaitReason.BLOCKS_IN_FLIGHT)
    counts = engine.kv.ref_counts
    assert sum(counts.values()) == len(engine.blocks(filler))  # the failed attempt holds nothing
    while engine.request(filler).status != "finished":
        engine.step()  # its output evicts the seed's blocks
    engine.run()
    cold = harness("kv_cache.enable_prefix_caching=false", "model.max_model_len=32")
    same = cold.add([*seed, *range(900, 908)], request_id=late, max_tokens=4)
    cold.run()
    assert engine.request(late).output_token_ids == cold.request(same).output_token_ids
    engine.check_idle()


@LOOPS
def test_sch_11_a_resumed_request_is_a_prefill_that_samples_one_token(harness: MakeHarness, loop: str) -> None:
    engine = harness("kv_cache.num_blocks=5", "kv_cache.block_size=4", "model.max_model_len=20", f"engine={loop}")
    first, second = engine.add([1] * 6, max_tokens=12), engine.add([2] * 6, max_tokens=12)
    while not engine.stats.num_preemptions:
        engine.step()
    resumed = []
    while engine.has_requests:
        outputs = engine.step()
        assert all(count == 1 for count in outputs.num_tokens.tolist())
        for output in engine.last_outputs:
            for start in output.resumed:
                row = output.slots.tolist().index(start.slot.index)
                resumed.append((start, int(output.num_scheduled_tokens[row])))
    assert resumed
    for start, num_scheduled in resumed:
        assert num_scheduled == len(start.token_ids) > 6  # a prefill of all it has, though it has output tokens
    alone = harness()
    for name, fill in ((first, 1), (second, 2)):
        alone.add([fill] * 6, request_id=name, max_tokens=12)
    alone.run()
    for name in (first, second):
        assert engine.request(name).output_token_ids == alone.request(name).output_token_ids


@LOOPS
def test_sch_13_an_abort_between_two_chunks_leaks_nothing(harness: MakeHarness, loop: str) -> None:
    engine = harness("scheduler.max_num_batched_tokens=32", f"engine={loop}")
    name = engine.add([5] * 200)
    engine.step()
    engine.finish(name)
    engine.run()
    assert engine.request(name).finish_reason == "abort"
    assert engine.kv.num_free == engine.kv.num_total
    engine.check_idle()


def test_sch_14_a_token_in_flight_is_not_delivered_after_an_abort(harness: MakeHarness) -> None:
    engine = harness("engine=overlap")
    name = engine.add([5] * 8, max_tokens=9)
    engine.step()
    had = list(engine.request(name).output_token_ids)
    engine.finish(name)
    assert engine.kv.num_free < engine.kv.num_total  # the step in flight still writes to its blocks
    outputs = engine.step()
    assert (list(outputs.request_ids), list(outputs.finished)) == ([], [])
    assert engine.request(name).output_token_ids == had
    engine.check_idle()


@LOOPS
@pytest.mark.parametrize("caching", ["true", "false"])
def test_kv_07_blocks_are_taken_exactly_at_block_edges(harness: MakeHarness, loop: str, caching: str) -> None:
    engine = harness(f"engine={loop}", f"kv_cache.enable_prefix_caching={caching}")
    for length in (15, 16, 17, 31, 32, 33):
        name = engine.add([length] * length, max_tokens=20)
        engine.step()
        while engine.request(name).status == "running":
            snapshot = engine.scheduler.snapshot().running[0]
            computed = snapshot.num_computed_tokens + snapshot.num_in_flight_tokens
            assert len(engine.blocks(name)) == -(-max(length, computed) // 16)
            engine.step()
        assert len(engine.request(name).output_token_ids) == 20
    engine.run()
    engine.check_idle()


@LOOPS
def test_kv_09_hits_count_once_however_often_an_admission_failed(harness: MakeHarness, loop: str) -> None:
    engine = harness(*CACHED_32, f"engine={loop}")
    engine.add(list(range(100, 109)), max_tokens=1)
    engine.run()
    filler = engine.add(list(range(300, 324)), max_tokens=6)
    engine.step()
    before = engine.stats
    late = engine.add([*range(100, 108), *range(500, 504)], max_tokens=2)
    for _ in range(3):
        engine.step()
        assert engine.stats.prefix_cache_queries == before.prefix_cache_queries
    engine.finish(filler)
    engine.run()
    assert engine.stats.prefix_cache_queries == before.prefix_cache_queries + 12
    assert engine.stats.prefix_cache_hits == before.prefix_cache_hits + engine.request(late).num_cached
    engine.check_idle()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 16), st.integers(0, 3)), min_size=1, max_size=10),
    budget=st.sampled_from([4, 7, 64]),
    num_blocks=st.sampled_from([14, 20, 200]),
    loop=st.sampled_from(["sync", "overlap"]),
)
def test_work_is_conserved_and_nobody_starves(
    rows: list[tuple[int, int, int]], budget: int, num_blocks: int, loop: str
) -> None:
    engine = EngineHarness(
        [
            f"engine={loop}",
            "scheduler.max_num_seqs=4",
            f"scheduler.max_num_batched_tokens={budget}",
            "kv_cache.block_size=4",
            f"kv_cache.num_blocks={num_blocks}",
            "kv_cache.enable_prefix_caching=false",
            "model.max_model_len=56",
        ]
    )
    started: list[str] = []
    for number, (length, max_tokens, steps) in enumerate(rows):
        engine.add([number + 1] * length, max_tokens=max_tokens)
        for _ in range(steps):
            if engine.has_requests:
                step_conserves_work(engine, started)
    total = sum(length + max_tokens for length, max_tokens, _ in rows)
    limit = 2 * len(rows) + 2 * total + total * (1 + engine.stats.num_preemptions + len(rows))
    for _ in range(limit):
        if not engine.has_requests:
            break
        step_conserves_work(engine, started)
    assert not engine.has_requests
    assert started == sorted(started, key=int)  # first come, first served: nobody is overtaken
    if num_blocks == 200:
        assert engine.stats.num_preemptions == 0  # 10 requests of 56 tokens fit
    engine.check_idle()
    engine.close()


def step_conserves_work(engine: EngineHarness, started: list[str]) -> None:
    """One step; it must run something. The harness itself checks that nobody waits who would have fitted."""
    outputs = engine.step()
    assert outputs.did_run
    started += [start.request_id for output in engine.last_outputs for start in output.new]


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_a_lone_request_never_preempts_itself(harness: MakeHarness, loop: str) -> None:
    engine = harness(f"engine={loop}", "kv_cache.num_blocks=3", "kv_cache.block_size=1", "model.max_model_len=16")
    for _ in range(3):
        name = engine.add([1], max_tokens=10)
        engine.run()
        assert engine.request(name).num_preemptions == 0
        assert len(engine.request(name).output_token_ids) == 3
