"""Packages frozen at an older plugin API run in this one, in both loops, as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from tokenyard import LLM, SamplingParams
from tokenyard.errors import ConfigError, PluginError, UnsupportedError
from tokenyard.interfaces import PauseMode
from tokenyard.plugins import load_catalogue
from tokenyard.testing import (
    AttentionBackendContract,
    EngineHarness,
    EvictionContract,
    KVCacheManagerContract,
    LatencyModelContract,
    PredictorContract,
)

Install = Callable[..., None]

GREEDY = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
PROMPTS = ["the cat sat on the mat", "one two", "the cat sat on the"]

LOOPS = pytest.mark.parametrize("loop", ["sync", "overlap"])


@pytest.fixture(autouse=True)
def frozen(install: Install) -> None:
    install(*(f"frozen_v1_{minor}" for minor in range(7)))


def test_they_say_what_they_were_written_for() -> None:
    found = {entry.name: entry.descriptor.api_version for entry in load_catalogue().entries() if "frozen" in entry.name}
    assert found == {
        "frozen_shortest_prompt": (1, 0),
        "frozen_urgent_first": (1, 1),
        "frozen_one_by_one": (1, 1),
        "frozen_plain": (1, 2),
        "frozen_turns": (1, 2),
        "frozen_unshared": (1, 2),
        "frozen_cache_index": (1, 2),
        "frozen_pages": (1, 3),
        "frozen_ladder": (1, 3),
        "frozen_tickets": (1, 3),
        "frozen_turnstile": (1, 4),
        "frozen_rows": (1, 4),
        "frozen_tally": (1, 4),
        "frozen_ledger": (1, 5),
        "frozen_chronicle": (1, 5),
        "frozen_shelves": (1, 5),
        "frozen_diary": (1, 5),
        "frozen_parity": (1, 5),
        "frozen_estimate": (1, 6),
        "frozen_roundabout": (1, 6),
        "frozen_average": (1, 6),
        "frozen_ticks": (1, 6),
        "frozen_queue": (1, 6),
        "frozen_ward": (1, 6),
    }


@LOOPS
@pytest.mark.parametrize("policy", ["frozen_shortest_prompt", "frozen_urgent_first"])
def test_a_policy_steers_an_engine_that_preempts(policy: str, loop: str) -> None:
    engine = EngineHarness(
        [
            f"scheduler={policy}",
            f"engine={loop}",
            "kv_cache.num_blocks=5",
            "kv_cache.block_size=4",
            "model.max_model_len=20",
        ]
    )
    names = [engine.add([100 * i + j for j in range(6)], priority=-i, max_tokens=12) for i in range(3)]
    engine.run()
    assert engine.stats.num_preemptions
    assert [len(engine.request(name).output_token_ids) for name in names] == [12, 12, 12]
    engine.check_idle()
    engine.close()


@LOOPS
def test_a_scheduler_gives_the_tokens_of_the_built_in_one(tiny_llama_dir: Path, loop: str) -> None:
    def tokens(scheduler: str) -> list[list[int]]:
        overrides = [f"model.name={tiny_llama_dir}", "kv_cache.num_blocks=64", "kv_cache.block_size=4"]
        with LLM.from_config([*overrides, f"scheduler={scheduler}", f"engine={loop}", "model.dtype=float32"]) as llm:
            outputs = [*llm.generate(PROMPTS, GREEDY), *llm.generate(PROMPTS[0], GREEDY)]
        return [output.outputs[0].token_ids for output in outputs]

    assert tokens("frozen_one_by_one") == tokens("fcfs")


@LOOPS
def test_a_scheduler_without_the_later_methods_is_paused_by_keep_and_abort_and_refuses_the_rest(loop: str) -> None:
    engine = EngineHarness(["scheduler=frozen_one_by_one", f"engine={loop}", "kv_cache.block_size=4"], checks=False)
    first, second = engine.add([1, 2, 3], max_tokens=5), engine.add([1, 2, 3], max_tokens=5)
    engine.step()
    for unknown in (lambda: engine.core.pause(PauseMode.WAIT), engine.scheduler.snapshot):
        with pytest.raises(UnsupportedError):
            unknown()
    engine.pause("keep")
    engine.step()
    engine.resume()
    engine.run()
    assert [len(engine.request(name).output_token_ids) for name in (first, second)] == [5, 5]
    last = engine.add([1, 2, 3], max_tokens=5)
    assert engine.pause("abort") == [last]
    assert engine.kv.num_free == engine.kv.num_total
    engine.close()


@pytest.mark.parametrize("loop", ["frozen_plain", "sync", "overlap"])
def test_a_policy_of_1_2_defers_and_a_manager_of_1_2_serves_every_loop(loop: str) -> None:
    engine = EngineHarness(
        [
            "scheduler=frozen_turns",
            "kv_cache=frozen_unshared",
            f"engine={loop}",
            "kv_cache.num_blocks=12",
            "kv_cache.block_size=4",
            "model.max_model_len=32",
            "observers=[frozen_cache_index]",
        ],
        group_windows=(None, None),
    )
    first = engine.add([1, 2, 3], client="a", max_tokens=6)
    engine.step()
    second, other = (engine.add([1, 2, 3], client=client, max_tokens=6) for client in ("a", "b"))
    engine.step()
    assert engine.running == [first, other]
    assert engine.waiting == [second]
    engine.run()
    assert [len(engine.request(name).output_token_ids) for name in (first, second, other)] == [6, 6, 6]
    engine.check_idle()
    engine.close()


def test_a_loop_of_1_2_pauses_in_every_mode() -> None:
    engine = EngineHarness(["engine=frozen_plain", "kv_cache.block_size=4"])
    first = engine.add([1, 2, 3], max_tokens=5)
    engine.step()
    engine.pause("keep")
    engine.step()
    engine.resume()
    engine.pause("wait")
    second = engine.add([1, 2, 3], max_tokens=5)
    while engine.running:
        engine.step()
    assert len(engine.request(first).output_token_ids) == 5
    assert engine.waiting == [second]
    assert engine.pause("abort") == [second]
    engine.resume()
    engine.check_idle()
    engine.close()


@pytest.mark.parametrize("loop", ["frozen_plain", "sync"])
def test_a_loop_of_1_2_gives_the_tokens_texts_and_log_probabilities_of_the_built_in_one(
    tiny_llama_dir: Path, loop: str
) -> None:
    """What 1.3 brought passes through a loop that knows nothing of it."""

    def outputs(*overrides: str) -> list[object]:
        given = [f"model.name={tiny_llama_dir}", "kv_cache.num_blocks=64", "kv_cache.block_size=4", *overrides]
        params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=1, n=2)
        with LLM.from_config([*given, "model.dtype=float32"]) as llm:
            found = llm.generate(PROMPTS, params, use_tqdm=False)
        return [
            (row.prompt_logprobs, [(one.token_ids, one.text, one.logprobs) for one in row.outputs]) for row in found
        ]

    frozen = outputs(f"engine={loop}", "kv_cache=frozen_unshared", "observers=[frozen_cache_index]")
    assert frozen == outputs()


class TestPagesOf13(AttentionBackendContract):
    """A backend of 1.3 keeps the contract of this version."""

    overrides = ("attention=frozen_pages", "attention.rows=5")
    dtypes = ("float32", "bfloat16")
    sinks = False
    max_examples = 6


@LOOPS
@pytest.mark.parametrize("family", [None, "gemma3_text"])
def test_an_attention_backend_of_1_3_gives_the_tokens_of_the_built_in_one(
    family: str | None, loop: str, tiny_llama_dir: Path, window_model: Callable[[str], Path]
) -> None:
    folder = tiny_llama_dir if family is None else window_model(family)

    def outputs(*overrides: str) -> list[list[int]]:
        given = [f"model.name={folder}", "kv_cache.num_blocks=64", "kv_cache.block_size=4", f"engine={loop}"]
        with LLM.from_config([*given, "model.dtype=float32", "executor.device=cpu", *overrides]) as llm:
            return [row.outputs[0].token_ids for row in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    frozen = outputs(
        "attention=frozen_pages", "attention.rows=3", "scheduler.max_num_batched_tokens=5", "scheduler.max_num_seqs=4"
    )
    assert frozen == outputs("attention=torch_native")


def test_an_attention_backend_of_1_3_refuses_by_name_what_it_has_not(window_model: Callable[[str], Path]) -> None:
    given = [f"model.name={window_model('gpt_oss')}", "model.dtype=float32", "attention=frozen_pages"]
    with pytest.raises(PluginError, match="attention 'frozen_pages' cannot run here: sinks are not known"):
        LLM.from_config([*given, "executor.device=cpu"])


@LOOPS
def test_a_logits_processor_of_1_3_changes_the_requests_that_ask_for_it(tiny_llama_dir: Path, loop: str) -> None:
    given = [f"model.name={tiny_llama_dir}", "kv_cache.num_blocks=64", "kv_cache.block_size=4", f"engine={loop}"]
    asking = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args={"ladder": True})
    with LLM.from_config([*given, "logits_processors=[{name: frozen_ladder, step: 2}]"]) as llm:
        rising, as_ever = llm.generate([PROMPTS[0], PROMPTS[0]], [asking, GREEDY], use_tqdm=False)
    ids = rising.outputs[0].token_ids
    assert all(later >= earlier + 2 for earlier, later in pairwise(ids))
    assert ids != as_ever.outputs[0].token_ids


@LOOPS
def test_a_policy_of_1_3_reads_what_requests_say_to_it(loop: str) -> None:
    engine = EngineHarness(["scheduler=frozen_tickets", f"engine={loop}", "scheduler.max_num_seqs=1"])
    names = [
        engine.add([1, 2, 3], max_tokens=2, metadata=told)
        for told in ({"number": 2}, {"lane": "fast", "number": 9}, {"number": 1}, {"lane": "fast"})
    ]
    ended: list[str] = []
    while engine.running or engine.waiting:
        engine.step()
        ended += [name for name in names if engine.request(name).is_finished and name not in ended]
    assert ended == [names[3], names[1], names[2], names[0]]
    engine.close()


@pytest.mark.slow
class TestRowsOf14(AttentionBackendContract):
    """A backend of 1.4, which may be recorded, keeps the contract of this version."""

    overrides = ("attention=frozen_rows",)
    dtypes = ("float32", "bfloat16")
    sinks = False
    max_examples = 6


@LOOPS
def test_a_scheduler_of_1_4_gives_the_tokens_of_the_built_in_one_and_an_observer_sees_them(
    tiny_llama_dir: Path, loop: str, tmp_path: Path
) -> None:
    told = tmp_path / "tally.json"

    def tokens(*overrides: str) -> list[list[int]]:
        given = [f"model.name={tiny_llama_dir}", "kv_cache.num_blocks=64", "kv_cache.block_size=4", f"engine={loop}"]
        with LLM.from_config([*given, "model.dtype=float32", "executor.device=cpu", *overrides]) as llm:
            return [row.outputs[0].token_ids for row in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    frozen = tokens(
        "scheduler=frozen_turnstile", "attention=frozen_rows", f"observers=[{{name: frozen_tally, path: {told}}}]"
    )
    assert frozen == tokens("attention=torch_native")
    found = json.loads(told.read_text())
    assert (found["tokens"], found["ended"]) == (18, ["length"] * 3)
    assert found["gauges"] == {"running": 0, "waiting": 0, "skipped": 0, "reason": None, "free": 64}


def test_a_scheduler_of_1_4_tells_no_events_and_a_loop_of_1_5_misses_none() -> None:
    engine = EngineHarness(["scheduler=frozen_turnstile", "kv_cache.block_size=4"], checks=False)
    first, second = engine.add([1, 2, 3], max_tokens=3), engine.add([4, 5], max_tokens=3)
    outputs = engine.step()
    assert (list(outputs.events), outputs.num_scheduled_tokens) == ([], 0)
    assert outputs.stats is not None
    assert outputs.stats.num_waiting_by_reason == {}
    engine.pause("keep")
    idle = engine.step()
    assert (idle.did_run, list(idle.events)) == (False, [])
    engine.resume()
    engine.run()
    assert [len(engine.request(name).output_token_ids) for name in (first, second)] == [3, 3]
    assert engine.kv.num_free == engine.kv.num_total
    engine.close()


def test_deadlines_pauses_and_snapshots_of_a_scheduler_of_1_4_work_as_they_did() -> None:
    engine = EngineHarness(["scheduler=frozen_turnstile", "kv_cache.block_size=4"], checks=False)
    late, first = engine.add([1, 2, 3], max_tokens=3, deadline=5.0), engine.add([4, 5], max_tokens=3)
    engine.pause("wait")
    engine.step()
    assert [row.request_id for row in engine.scheduler.snapshot().waiting] == [late, first]
    engine.resume()
    engine.advance(6.0)
    engine.run()
    assert [str(engine.request(name).finish_reason) for name in (late, first)] == ["abort", "length"]
    engine.close()


@LOOPS
def test_a_policy_of_1_5_decides_and_is_told_as_ever(loop: str) -> None:
    engine = EngineHarness(
        [
            "scheduler=frozen_ledger",
            "scheduler.policy.longest=12",
            "scheduler.policy.most=1",
            f"engine={loop}",
            "kv_cache=frozen_shelves",
            "kv_cache.num_blocks=6",
            "kv_cache.block_size=4",
            "model.max_model_len=24",
        ]
    )
    refused = engine.add(range(13), client="a")
    first = engine.add(range(6), client="a", max_tokens=9)
    engine.step()
    second = engine.add(range(6), client="a", max_tokens=9)
    other = engine.add(range(50, 56), client="b", max_tokens=9)
    engine.step()
    assert engine.running == [first, other]
    assert engine.waiting == [second]
    assert engine.request(second).wait_reason == "deferred"
    engine.run()
    assert "more than 12 tokens" in (engine.request(refused).error or "")
    assert [len(engine.request(name).output_token_ids) for name in (first, second, other)] == [9, 9, 9]
    told = engine.policy.told  # type: ignore[union-attr]  # the package's own
    assert (told["arrival"], told["finish"]) == (4, 4)
    assert told["admit"] == 3 + told["preempt"]
    engine.check_idle()
    engine.close()


def test_who_loses_its_turn_under_a_manager_of_1_5_computes_again() -> None:
    """It keeps nothing in host memory, and counts as a request's own whatever is in its tables."""
    given = ["scheduler=fcfs", "scheduler.preempt_mode=swap", "kv_cache=frozen_shelves", "kv_cache.num_blocks=5"]
    engine = EngineHarness([*given, "kv_cache.block_size=4", "model.max_model_len=20"])
    names = [engine.add(range(100 * number, 100 * number + 6), max_tokens=12) for number in range(3)]
    engine.run()
    assert engine.stats.num_preemptions
    assert [len(engine.request(name).output_token_ids) for name in names] == [12, 12, 12]
    engine.close()


def test_host_memory_is_refused_where_a_part_of_1_5_would_not_use_it(tiny_llama_dir: Path) -> None:
    given = [f"model.name={tiny_llama_dir}", "kv_cache=frozen_shelves", "kv_cache.host_memory=1MiB"]
    with pytest.raises(ConfigError, match=r"kv_cache 'frozen_shelves' was written for 1\.5"):
        LLM.from_config(given)


class TestShelvesOf15(KVCacheManagerContract):
    """A manager of 1.5, which shares beginnings while somebody holds them, keeps the contract of this version."""

    overrides = ("kv_cache=frozen_shelves",)
    shares_prefixes = False  # once nobody holds them
    max_examples = 8


def test_a_scheduler_of_1_5_is_steered_and_tells_events_between_steps() -> None:
    engine = EngineHarness(["scheduler=frozen_chronicle", "kv_cache.block_size=4"], checks=False)
    first, second = engine.add([1, 2, 3], max_tokens=3), engine.add([4, 5], max_tokens=3)
    outputs = engine.step()
    assert [(event.request_id, event.kind.value, event.num_tokens) for event in outputs.events] == [(first, "chunk", 3)]
    assert outputs.num_scheduled_tokens == 3
    assert outputs.stats is not None
    assert outputs.stats.num_waiting_by_reason == {"max_num_seqs": 1}
    assert (outputs.stats.num_paused, engine.waiting) == (0, [second])
    engine.run()
    engine.check_idle()
    engine.close()


@LOOPS
def test_a_scheduler_and_a_manager_of_1_5_give_the_tokens_of_the_built_in_ones_and_an_observer_sees_the_events(
    tiny_llama_dir: Path, loop: str, tmp_path: Path
) -> None:
    told = tmp_path / "diary.json"

    def tokens(*overrides: str) -> list[list[int]]:
        given = [f"model.name={tiny_llama_dir}", "kv_cache.num_blocks=64", "kv_cache.block_size=4", f"engine={loop}"]
        with LLM.from_config([*given, "model.dtype=float32", "executor.device=cpu", *overrides]) as llm:
            return [row.outputs[0].token_ids for row in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]

    observer = f"observers=[{{name: frozen_diary, path: {told}}}]"
    assert tokens("scheduler=frozen_chronicle", "kv_cache=frozen_shelves", observer) == tokens()
    found = json.loads(told.read_text())
    assert found["events"] == {"chunk": 3}
    assert found["chunk_tokens"] < found["scheduled_tokens"]
    assert found["waited"] == ["max_num_seqs"]


@LOOPS
def test_a_logits_processor_of_1_5_changes_the_requests_that_ask_for_it(tiny_llama_dir: Path, loop: str) -> None:
    given = [f"model.name={tiny_llama_dir}", "kv_cache.num_blocks=64", "kv_cache.block_size=4", f"engine={loop}"]
    asking = [
        SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, extra_args={"parity": parity}) for parity in (0, 1)
    ]
    with LLM.from_config([*given, "logits_processors=[frozen_parity]"]) as llm:
        even, odd = llm.generate([PROMPTS[0], PROMPTS[0]], asking, use_tqdm=False)
    assert {token % 2 for token in even.outputs[0].token_ids} == {0}
    assert {token % 2 for token in odd.outputs[0].token_ids} == {1}


class TestAverageOf16(PredictorContract):
    """A predictor of 1.6 keeps the contract of this version."""

    overrides = ("scheduler.predictor={name: frozen_average, first: 5}",)
    max_examples = 8


class TestTicksOf16(LatencyModelContract):
    """A latency model of 1.6, which does not say what it was calibrated on, keeps the contract of this version."""

    overrides = ("latency=frozen_ticks", "latency.size=8")
    max_examples = 8


class TestQueueOf16(EvictionContract):
    """An eviction rule of 1.6 keeps the contract of this version."""

    overrides = ("kv_cache.eviction=frozen_queue",)
    max_examples = 8


@LOOPS
@pytest.mark.parametrize("mode", ["recompute", "swap", "pause"])
def test_a_policy_of_1_6_displaces_by_what_its_predictor_says(mode: str, loop: str, tmp_path: Path) -> None:
    told = tmp_path / "ward.json"
    engine = EngineHarness(
        [
            *("scheduler=frozen_estimate", "scheduler.max_num_seqs=2", "scheduler.predictor=oracle"),
            *(f"scheduler.preempt_mode={mode}", f"engine={loop}", "kv_cache.eviction=frozen_queue"),
            *("kv_cache.num_blocks=24", "kv_cache.block_size=4", "model.max_model_len=48", "kv_cache.host_memory=96"),
            f"observers=[{{name: frozen_ward, path: {told}}}]",
        ]
    )
    long = [engine.add([100 * number + token for token in range(6)], max_tokens=20) for number in range(2)]
    for _ in range(4):
        engine.step()
    short = engine.add(range(900, 906), max_tokens=2)
    while not engine.request(short).is_finished:
        engine.step()
    assert not any(engine.request(name).is_finished for name in long)
    engine.run()
    assert [len(engine.request(name).output_token_ids) for name in (*long, short)] == [20, 20, 2]
    engine.check_idle()
    engine.close()
    found = json.loads(told.read_text())
    assert found["modes"] == {mode: 1}
    assert bool(found["transfers"]) == (mode == "swap")
    assert bool(found["most_paused"]) == (mode == "pause")
    assert {"waiting_key", "running_order", "on_preempt"} <= {*found["points"]}


@LOOPS
def test_a_policy_of_1_6_asks_the_latency_model_of_1_6(loop: str) -> None:
    given = ["scheduler=frozen_estimate", "scheduler.policy.patience=0.3", "latency=frozen_ticks", "latency.size=4"]
    engine = EngineHarness([*given, f"engine={loop}", "kv_cache.block_size=4"])
    refused, taken = engine.add(range(6), max_tokens=60), engine.add(range(6), max_tokens=10)
    engine.step()
    assert "is too long" in (engine.request(refused).error or "")
    engine.run()
    assert len(engine.request(taken).output_token_ids) == 10
    engine.check_idle()
    engine.close()


@LOOPS
def test_a_policy_of_1_6_serves_clients_in_turn(loop: str) -> None:
    engine = EngineHarness(
        [
            *("scheduler=frozen_roundabout", f"engine={loop}", "scheduler.max_num_seqs=1"),
            *("kv_cache=paged", "kv_cache.eviction=frozen_queue", "kv_cache.num_blocks=32", "kv_cache.block_size=4"),
            "model.max_model_len=48",
        ]
    )
    names = [engine.add(range(8), client="a", max_tokens=4) for _ in range(3)]
    other = engine.add(range(50, 58), client="b", max_tokens=4)
    ended: list[str] = []
    while engine.running or engine.waiting:
        engine.step()
        ended += [name for name in (*names, other) if engine.request(name).is_finished and name not in ended]
    assert ended == [names[0], other, *names[1:]]
    assert engine.policy.longest_line == 3  # type: ignore[union-attr]  # the package's own
    engine.check_idle()
    engine.close()
