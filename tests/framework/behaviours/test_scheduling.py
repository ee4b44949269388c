"""Section 2 of the public engine behaviours: order, chunks, pipelining, preemption, statistics, hygiene."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenyard.testing import EngineHarness

MakeHarness = Callable[..., EngineHarness]

LOOPS = pytest.mark.parametrize("loop", ["sync", "overlap"])


def prompt(length: int, start: int = 100) -> list[int]:
    return list(range(start, start + length))


def test_s1_requests_are_found_by_id_and_counted_as_they_come(harness: MakeHarness) -> None:
    engine = harness()
    for count in range(1, 11):
        name = engine.add(prompt(8), request_id=f"r{count}")
        assert engine.request(name).status == "waiting"
        assert engine.stats.num_waiting == len(engine.waiting) == count


def test_s2_waiting_requests_end_one_by_one(harness: MakeHarness) -> None:
    engine = harness()
    names = [engine.add(prompt(8)) for _ in range(10)]
    for count, name in zip(reversed(range(10)), names, strict=True):
        assert list(engine.finish(name)) == [name]
        assert name not in engine.waiting
        assert engine.stats.num_waiting == count
    assert not engine.has_requests


@pytest.mark.parametrize("caching", ["true", "false"])
def test_s3_ten_short_prompts_run_whole_in_one_step(harness: MakeHarness, caching: str) -> None:
    engine = harness(f"kv_cache.enable_prefix_caching={caching}")
    names = [engine.add(prompt(5 + i, 100 * i)) for i in range(10)]
    outputs = engine.step()
    assert engine.scheduled == {name: 5 + i for i, name in enumerate(names)}
    assert (engine.waiting, engine.running) == ([], names)
    assert not outputs.finished


@pytest.mark.parametrize(("chunked", "expected"), [("true", [800, 224]), ("false", [800])])
def test_s4_nobody_skips_ahead(harness: MakeHarness, chunked: str, expected: list[int]) -> None:
    engine = harness(
        "scheduler.max_num_batched_tokens=1024",
        "scheduler.max_num_seqs=3",
        "model.max_model_len=1024",
        f"scheduler.enable_chunked_prefill={chunked}",
    )
    names = [engine.add(prompt(length, 1000 * i)) for i, length in enumerate((800, 800, 10, 10))]
    engine.step()
    assert engine.scheduled == dict(zip(names, expected, strict=False))


@pytest.mark.parametrize("caching", ["true", "false"])
def test_s5_partial_prefills_run_beside_each_other(harness: MakeHarness, caching: str) -> None:
    engine = harness(
        "scheduler.max_num_batched_tokens=1024",
        "scheduler.long_prefill_token_threshold=400",
        f"kv_cache.enable_prefix_caching={caching}",
    )
    names = [engine.add(prompt(800, 10000 * i)) for i in range(3)]
    for counts, sampled in (((400, 400, 224), set()), ((400, 400, 224), set(names[:2])), ((1, 1, 352), set(names))):
        outputs = engine.step()
        assert engine.scheduled == dict(zip(names, counts, strict=True))
        assert set(outputs.request_ids) == sampled


def test_s7_a_request_is_scheduled_again_before_its_token_has_arrived(harness: MakeHarness) -> None:
    engine = harness("engine=overlap")
    name = engine.add(prompt(8), max_tokens=4)
    outputs = engine.step()
    assert list(outputs.request_ids) == [name]
    assert len(engine.request(name).output_token_ids) == 1
    snapshot = engine.scheduler.snapshot().running[0]
    assert snapshot.num_in_flight_tokens == 1  # the second step is in flight already
    assert engine.request(name).num_computed == 8  # delivered tokens only
    engine.run()
    assert len(engine.request(name).output_token_ids) == 4


def test_s7_the_last_permitted_token_is_not_computed_past(harness: MakeHarness) -> None:
    engine = harness("engine=overlap")
    engine.add(prompt(8), max_tokens=2)
    engine.run()
    assert engine.steps == 2  # prefill and one decode: the length was known when they were scheduled


SMALL_POOL = ["kv_cache.num_blocks=5", "kv_cache.block_size=4", "model.max_model_len=64"]


def preempted(engine: EngineHarness) -> tuple[str, str]:
    """Two requests in a pool that holds one and a half; returns (the one that goes on, the one that was preempted)."""
    first = engine.add(prompt(6, 100), max_tokens=12)
    second = engine.add(prompt(6, 200), max_tokens=12)
    while not engine.stats.num_preemptions:
        engine.step()
    return first, second


@LOOPS
def test_s17_a_preempted_request_waits_in_front_and_resumes_with_all_its_tokens(
    harness: MakeHarness, loop: str
) -> None:
    engine = harness(*SMALL_POOL, f"engine={loop}")
    first, second = preempted(engine)
    third = engine.add(prompt(4, 300), max_tokens=1)
    assert engine.request(second).status == "preempted"
    assert engine.waiting == [second, third]
    assert engine.request(second).num_computed == 0
    had = list(engine.request(second).output_token_ids)
    assert had
    starts = []
    while not starts:
        engine.step()
        starts = [start for output in engine.last_outputs for start in output.resumed]
    (start,) = starts
    assert start.request_id == second
    tokens = [*prompt(6, 200), *engine.request(second).output_token_ids]
    assert start.token_ids.tolist() == tokens[: len(start.token_ids)]
    assert len(start.token_ids) >= 6 + len(had)
    engine.run()
    assert [len(engine.request(name).output_token_ids) for name in (first, second, third)] == [12, 12, 1]
    engine.check_idle()


def test_s18_look_ups_of_resumed_requests_are_counted_apart(harness: MakeHarness) -> None:
    engine = harness(*SMALL_POOL, "kv_cache.enable_prefix_caching=true")
    _, second = preempted(engine)
    had = 6 + len(engine.request(second).output_token_ids)
    queries = engine.stats.prefix_cache_queries
    engine.run()
    stats = engine.stats
    assert stats.prefix_cache_queries == queries == 12
    assert stats.preempted_prefix_cache_queries == had
    assert 0 <= stats.preempted_prefix_cache_hits <= had


@LOOPS
def test_s19_a_preempted_request_that_is_aborted_is_freed_once_and_keeps_its_tokens(
    harness: MakeHarness, loop: str
) -> None:
    engine = harness(*SMALL_POOL, f"engine={loop}")
    first, second = preempted(engine)
    had = list(engine.request(second).output_token_ids)
    assert list(engine.finish([second, second])) == [second]
    assert list(engine.finish(second)) == []
    assert engine.request(second).finish_reason == "abort"
    engine.run()
    assert engine.request(second).output_token_ids == had
    assert len(engine.request(first).output_token_ids) == 12
    engine.check_idle()


@LOOPS
def test_s19_a_request_preempted_twice_loses_nothing(harness: MakeHarness, loop: str) -> None:
    engine = harness("kv_cache.num_blocks=9", "kv_cache.block_size=2", "model.max_model_len=19", f"engine={loop}")
    names = [engine.add(prompt(3, 100 * i), max_tokens=12) for i in range(4)]
    engine.run()
    assert max(engine.request(name).num_preemptions for name in names) >= 2
    assert all(len(engine.request(name).output_token_ids) == 12 for name in names)
    engine.check_idle()


def test_s21_a_cache_that_is_off_was_not_asked(harness: MakeHarness) -> None:
    engine = harness()
    engine.add(prompt(40))
    engine.run()
    assert (engine.stats.prefix_cache_queries, engine.stats.prefix_cache_hits) == (0, 0)


@LOOPS
def test_s22_an_empty_sample_counts_nothing_and_the_request_goes_on(harness: MakeHarness, loop: str) -> None:
    engine = harness(f"engine={loop}")
    name = engine.add(prompt(8), max_tokens=3)
    other = engine.add(prompt(8, 500), max_tokens=3)
    engine.step()
    before = engine.stats.num_generation_tokens
    outputs = engine.step(tokens={name: []})
    assert list(outputs.request_ids) == [other]
    assert engine.stats.num_generation_tokens == before + 1
    engine.run()
    assert [len(engine.request(one).output_token_ids) for one in (name, other)] == [3, 3]
    engine.check_idle()


def test_s23_stats_can_be_switched_off_and_ends_name_their_client(harness: MakeHarness) -> None:
    quiet = harness("engine.log_stats=false")
    quiet.add(prompt(8), max_tokens=1)
    assert quiet.step().stats is None
    engine = harness()
    engine.add(prompt(8), client="alice", max_tokens=1)
    engine.add(prompt(8), client="bob", max_tokens=2)
    outputs = engine.step()
    assert outputs.stats is not None
    assert [row.client_id for row in outputs.admitted] == ["alice", "bob"]
    assert [row.client_id for row in outputs.finished] == ["alice"]


@LOOPS
@pytest.mark.parametrize("caching", ["true", "false"])
def test_s25_nothing_is_left_behind(harness: MakeHarness, loop: str, caching: str) -> None:
    engine = harness(f"engine={loop}", f"kv_cache.enable_prefix_caching={caching}")
    for i in range(10):
        engine.add(prompt(5 + 37 * i, 1000 * i), max_tokens=1 + 7 * (i % 4))
    engine.run()
    assert (engine.running, engine.waiting, engine.has_requests) == ([], [], False)
    assert engine.kv.num_free == engine.kv.num_total == 10000
    assert set(engine.kv.ref_counts.values()) == {0}
    engine.check_idle()


def test_s22_a_row_without_a_token_goes_on_beside_one_with_several(harness: MakeHarness) -> None:
    engine = harness()
    several, none = engine.add(prompt(8), max_tokens=9), engine.add(prompt(8, 500), max_tokens=9)
    engine.step(tokens={several: [10, 11], none: []})
    engine.run(limit=40)
    assert [len(engine.request(name).output_token_ids) for name in (several, none)] == [9, 9]


def test_sch_01_what_a_request_waits_for_is_told_as_it_was(harness: MakeHarness) -> None:
    engine = harness("kv_cache.num_blocks=10", "kv_cache.block_size=4", "model.max_model_len=64")
    holder = engine.add(prompt(30), max_tokens=1)
    late = engine.add(prompt(20, 300))
    engine.step()
    assert engine.request(holder).status == "finished"
    assert engine.request(late).wait_detail == "20 tokens to hold, 2 of 10 blocks were free"
