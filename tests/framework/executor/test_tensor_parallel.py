"""Two ranks generate what one does, in float32, however the work is cut into steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import family_models
import numpy as np
import pytest
from tokenyard import LLM, RequestOutput, SamplingParams

LLAMA, QWEN3 = "llama", "qwen3"
SHARED = "the same beginning of them all, "
PROMPTS = [SHARED + "one", SHARED + "another and a longer one", "hi", SHARED + "one", "x" * 40, "the end"]
GREEDY = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
TWO_RANKS = ["executor=multiproc", "executor.tensor_parallel_size=2", "executor.num_threads=1"]
# Chunked prompts, a prefix cache, and blocks for two and a half of these requests: some are preempted.
TIGHT = [
    *("kv_cache.block_size=4", "kv_cache.num_blocks=40", "model.max_model_len=64"),
    *("scheduler.max_num_seqs=6", "scheduler.max_num_batched_tokens=16"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> dict[str, Path]:
    qwen3 = family_models.write_model(tmp_path_factory.mktemp("tp") / "qwen3", "qwen3", tiny_llama_dir)
    return {LLAMA: tiny_llama_dir, QWEN3: qwen3}


def make(folder: Path, *overrides: str) -> LLM:
    return LLM(folder, dtype="float32", attention="torch_native", overrides=list(overrides))


@pytest.fixture(scope="module", params=[LLAMA, QWEN3])
def one(request: pytest.FixtureRequest, folders: dict[str, Path]) -> Iterator[tuple[str, LLM]]:
    """One rank with room for everything, and the name of its model."""
    with make(folders[request.param], "model.max_model_len=64") as llm:
        yield request.param, llm


@pytest.fixture(scope="module", params=["sync", "overlap"])
def two(request: pytest.FixtureRequest, one: tuple[str, LLM], folders: dict[str, Path]) -> Iterator[LLM]:
    """Two ranks with little room, under each loop."""
    with make(folders[one[0]], *TWO_RANKS, *TIGHT, f"engine={request.param}") as llm:
        yield llm


def tokens(outputs: list[RequestOutput]) -> list[tuple[int, ...]]:
    return [tuple(output.outputs[0].token_ids) for output in outputs]


def test_greedy_tokens_are_those_of_one_rank(one: tuple[str, LLM], two: LLM) -> None:
    expected = tokens(one[1].generate(PROMPTS, GREEDY, use_tqdm=False))
    assert tokens(two.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    again = two.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert tokens(again) == expected
    assert any(output.num_cached_tokens for output in again)
    stats = {metric.alias: metric.value for metric in two.get_metrics()}
    assert stats["vllm:num_preemptions"] > 0


def test_sampled_tokens_are_those_of_one_rank(one: tuple[str, LLM], two: LLM) -> None:
    """One rank samples, with the request's own random numbers."""
    params = [
        SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True, seed=index, top_p=0.95)
        for index in range(len(PROMPTS))
    ]
    expected = tokens(one[1].generate(PROMPTS, params, use_tqdm=False))
    assert tokens(two.generate(PROMPTS, params, use_tqdm=False)) == expected


def test_penalties_and_bans_see_the_same_history(one: tuple[str, LLM], two: LLM) -> None:
    params = SamplingParams(
        temperature=0, max_tokens=20, ignore_eos=True, repetition_penalty=1.2, frequency_penalty=0.3, bad_words=["hi"]
    )
    expected = tokens(one[1].generate(PROMPTS, params, use_tqdm=False))
    assert tokens(two.generate(PROMPTS, params, use_tqdm=False)) == expected


def test_logprobs_of_outputs_and_prompts_are_close(one: tuple[str, LLM], two: LLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)
    found, expected = (llm.generate(PROMPTS, params, use_tqdm=False) for llm in (two, one[1]))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(all_logprobs(ours), all_logprobs(theirs), atol=2e-4)


def all_logprobs(output: RequestOutput) -> list[float]:
    """Of every position, from its most likely token on."""
    positions = [*(output.prompt_logprobs or ())[1:], *(output.outputs[0].logprobs or ())]
    assert len(positions) >= 6
    return [value for position in positions for value in sorted(one.logprob for one in (position or {}).values())]
