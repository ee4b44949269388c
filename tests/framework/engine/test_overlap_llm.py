"""LLM and the command line with engine=overlap on a tiny model: the tokens of engine=sync, and nothing left behind."""

from __future__ import annotations

import gc
import json
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from tokenyard import LLM, SamplingParams
from tokenyard.cli import run
from tokenyard.engine.input_processor import Prompt
from tokenyard.errors import CapacityError, EngineDeadError, UserError
from tokenyard.outputs import RequestOutput
from tokenyard.worker.model_runner import ModelRunner

SHARED = "the hi the he hi the the hi "
PROMPTS: list[Prompt] = [
    *(SHARED * (1 + index % 3) + "hi" * index for index in range(8)),
    *("the" * (1 + index % 4) for index in range(8)),
    *([5 + index, 6, 7 + index % 3] for index in range(8)),
]
GREEDY = SamplingParams(temperature=0, max_tokens=12)
SEEDED = [
    SamplingParams(temperature=0.9, top_p=0.95, seed=index, max_tokens=4 + index % 9, ignore_eos=bool(index % 2))
    for index in range(len(PROMPTS))
]
STOPPING = [
    SamplingParams(temperature=0.8, seed=index, max_tokens=20, stop=["h", "e"]) for index in range(len(PROMPTS))
]
SAMPLING: list[SamplingParams | list[SamplingParams]] = [GREEDY, SEEDED, STOPPING]
POOLS = {
    "roomy": ["kv_cache.num_blocks=200"],
    "no prefix cache": ["kv_cache.num_blocks=200", "kv_cache.enable_prefix_caching=false"],
    "preempting, block size 16": ["kv_cache.num_blocks=9"],
    "preempting, block size 1": ["kv_cache.num_blocks=160", "kv_cache.block_size=1"],
    "budget 7": ["kv_cache.num_blocks=200", "scheduler.max_num_batched_tokens=7", "scheduler.max_num_seqs=4"],
    "one at a time": ["kv_cache.num_blocks=200", "scheduler.max_num_seqs=1"],
}


def start(folder: Path, overrides: Sequence[str], engine: str = "overlap") -> LLM:
    return LLM(folder, dtype="float32", max_model_len=128, engine=engine, overrides=overrides)


def what_matters(outputs: Sequence[RequestOutput]) -> list[tuple[object, ...]]:
    completions = [output.outputs[0] for output in outputs]
    return [(row.token_ids, row.text, row.finish_reason, row.stop_reason) for row in completions]


def check_idle(llm: LLM) -> None:
    stats = llm.engine.core.stats()
    assert not llm.engine.core.has_requests()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_total_blocks


@pytest.fixture
def executor_threads() -> Callable[[], list[threading.Thread]]:
    """Those that began since the test did: the engine of another one may not have been collected yet."""
    before = set(threading.enumerate())

    def began() -> list[threading.Thread]:
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("tokenyard-executor")]
        return [thread for thread in threads if thread not in before]

    return began


@pytest.fixture(scope="module")
def expected(tiny_llama_dir: Path) -> list[list[tuple[object, ...]]]:
    """What the sync loop gives."""
    with start(tiny_llama_dir, POOLS["roomy"], "sync") as llm:
        return [what_matters(llm.generate(PROMPTS, params, use_tqdm=False)) for params in SAMPLING]


@pytest.fixture
def llm(tiny_llama_dir: Path) -> Iterator[LLM]:
    with start(tiny_llama_dir, ["kv_cache.num_blocks=64"]) as made:
        yield made
        check_idle(made)


@pytest.mark.parametrize("pool", POOLS)
def test_tokens_text_and_reasons_are_those_of_sync(
    pool: str, expected: list[list[tuple[object, ...]]], tiny_llama_dir: Path
) -> None:
    with start(tiny_llama_dir, POOLS[pool]) as llm:
        for params, wanted in zip(SAMPLING, expected, strict=True):
            assert what_matters(llm.generate(PROMPTS, params, use_tqdm=False)) == wanted
            check_idle(llm)
        assert (llm.engine.core.stats().num_preemptions > 0) == pool.startswith("preempting")


def test_the_expected_outputs_cover_stop_tokens_stop_strings_and_lengths(
    expected: list[list[tuple[object, ...]]],
) -> None:
    reasons = {(finish, isinstance(stop, str)) for rows in expected for *_, finish, stop in rows}
    assert {("length", False), ("stop", True)} <= reasons
    assert len({str(row[0]) for row in expected[1]}) > len(PROMPTS) / 2


def test_tokens_past_a_stop_string_are_dropped_and_not_counted(llm: LLM) -> None:
    whole = llm.generate("the", GREEDY, use_tqdm=False)[0].outputs[0]
    before = llm.engine.core.stats().num_generation_tokens
    stop = whole.text[3:5]
    params = SamplingParams(temperature=0, max_tokens=12, stop=[stop])
    output = llm.generate("the", params, use_tqdm=False)[0].outputs[0]
    assert (output.finish_reason, output.stop_reason) == ("stop", stop)
    assert output.text == whole.text[: whole.text.index(stop)]
    assert output.token_ids == whole.token_ids[: len(output.token_ids)]
    assert len(output.token_ids) < len(whole.token_ids)
    assert llm.engine.core.stats().num_generation_tokens - before == len(output.token_ids)


def test_e3_requests_that_are_aborted_in_flight_take_nothing_from_the_others(llm: LLM) -> None:
    wanted = what_matters(llm.generate(PROMPTS, GREEDY, use_tqdm=False))
    client, prompts = llm._client, [llm.tokenize(prompt) for prompt in PROMPTS]
    seen = 0

    def on_update(request_ids: Sequence[str], update: object) -> None:
        nonlocal seen
        seen += 1
        if seen == 4:
            client.abort(request_ids[::2])

    outputs = client.complete(prompts, [GREEDY] * len(prompts), [0] * len(prompts), on_update)
    found = what_matters(outputs)
    assert found[1::2] == wanted[1::2]
    for (tokens, _, reason, _), whole in zip(found[::2], wanted[::2], strict=True):
        assert reason == "abort" or tokens == whole[0]
        assert isinstance(tokens, list)
        assert tokens == whole[0][: len(tokens)]  # type: ignore[index]
    assert "abort" in {reason for _, _, reason, _ in found}


def test_a_stream_that_is_ended_by_its_reader_waits_for_its_steps(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    output = llm.stream(llm.tokenize("the"), long, lambda piece: False)
    assert (output.outputs[0].finish_reason, len(output.outputs[0].token_ids)) == ("abort", 1)
    check_idle(llm)


@pytest.mark.parametrize("at", [1, 2, 3])
def test_ctrl_c_between_steps_ends_the_requests_and_gives_their_blocks_back_at_once(llm: LLM, at: int) -> None:
    before = what_matters(llm.generate("hi", GREEDY, use_tqdm=False))
    seen = []

    def interrupt(piece: str) -> None:
        seen.append(piece)
        if len(seen) == at:
            signal.raise_signal(signal.SIGINT)

    long = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
    with pytest.raises(KeyboardInterrupt):
        llm.stream(llm.tokenize("the"), long, interrupt)
    check_idle(llm)
    assert llm.reset_prefix_cache()
    assert what_matters(llm.generate("hi", GREEDY, use_tqdm=False)) == before


def test_a_callback_may_generate_and_fail_while_its_own_request_runs(llm: LLM) -> None:
    long = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
    alone = llm.stream(llm.tokenize("the"), long, lambda piece: None).outputs[0]
    failures: list[ZeroDivisionError] = []

    def fail(piece: str) -> None:
        raise ZeroDivisionError("mine")

    def nested(piece: str) -> None:
        if not failures:
            with pytest.raises(ZeroDivisionError) as caught:
                llm.stream(llm.tokenize("hi"), long, fail)
            failures.append(caught.value)

    assert llm.stream(llm.tokenize("the"), long, nested).outputs[0].token_ids == alone.token_ids
    assert failures


def test_driving_a_paused_engine_is_a_user_error_and_resuming_it_helps(llm: LLM) -> None:
    llm.engine.core.pause()
    with pytest.raises(UserError, match="paused"):
        llm.generate("hi", GREEDY, use_tqdm=False)
    check_idle(llm)
    llm.engine.core.resume()
    assert llm.generate("hi", GREEDY, use_tqdm=False)[0].finished


def test_a_failing_forward_pass_is_told_as_what_it_is_and_shutdown_still_works(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, executor_threads: Callable[[], list[threading.Thread]]
) -> None:
    def fail(self: ModelRunner, output: object) -> None:
        raise ArithmeticError("bad weights")

    monkeypatch.setattr(ModelRunner, "execute", fail)
    with start(tiny_llama_dir, ["kv_cache.num_blocks=64"]) as llm:
        with pytest.raises(EngineDeadError, match="ArithmeticError: bad weights") as caught:
            llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert isinstance(caught.value.__cause__, ArithmeticError)
        with pytest.raises(EngineDeadError, match="bad weights"):
            llm.generate("hi", GREEDY, use_tqdm=False)
    assert executor_threads() == []


def test_no_thread_is_left_after_a_shutdown_a_failed_start_or_a_lost_engine(
    tiny_llama_dir: Path, executor_threads: Callable[[], list[threading.Thread]]
) -> None:
    with start(tiny_llama_dir, ["kv_cache.num_blocks=64"]) as llm:
        llm.generate("hi", GREEDY, use_tqdm=False)
        assert len(executor_threads()) == 1
    assert executor_threads() == []
    with pytest.raises(CapacityError):
        start(tiny_llama_dir, ["kv_cache.memory=1KiB"])
    assert executor_threads() == []
    lost = start(tiny_llama_dir, ["kv_cache.num_blocks=64"])
    threads = executor_threads()
    assert lost.generate("hi", GREEDY, use_tqdm=False)
    del lost, llm
    gc.collect()
    for thread in threads:
        thread.join(timeout=60)
    assert executor_threads() == []


def test_the_command_line_takes_it(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str], executor_threads: Callable[[], list[threading.Thread]]
) -> None:
    answers = []
    for engine in ("sync", "overlap"):
        arguments = ["generate", "the", str(tiny_llama_dir), "--raw", "--json", "--max-tokens", "8", "--ignore-eos"]
        assert run([*arguments, "--temperature", "0", f"engine={engine}", "kv_cache.num_blocks=64"]) == 0
        answers.append(json.loads(capsys.readouterr().out))
    assert answers[0]["token_ids"] == answers[1]["token_ids"]
    assert len(answers[0]["token_ids"]) == 8
    assert executor_threads() == []
