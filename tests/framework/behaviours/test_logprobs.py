"""E16, K5, KV-08 with a real model: log probabilities are those of transformers, however the steps were cut."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import window_models
from core_runs import CoreRun, reference_logprobs
from tokenyard.request import FinishReason
from tokenyard.sampling_params import SamplingParams
from tokenyard.testing.contracts.logprobs import Position

TOLERANCE = 1e-4
LENGTHS = (33, 1, 2, 18, 7, 40)
PROMPTS = {f"p{length}": window_models.prompt_of(length, seed=length) for length in LENGTHS}
ASKS = SamplingParams(temperature=0, max_tokens=6, logprobs=3, prompt_logprobs=2)
LOOPS = ["engine=sync", "engine=overlap"]
SHAPES = {
    "whole": ["scheduler.max_num_batched_tokens=512"],
    "budget 7": ["scheduler.max_num_batched_tokens=7", "scheduler.max_num_seqs=4"],
    "budget 1": ["scheduler.max_num_batched_tokens=1", "scheduler.max_num_seqs=1"],
    "preempting": ["kv_cache.num_blocks=16", "scheduler.max_num_batched_tokens=9", "scheduler.max_num_seqs=4"],
}


def check_position(position: Position, expected: np.ndarray, token_id: int, count: int) -> None:
    """One position against transformers' log probabilities [V]; equally likely tokens may be in any order."""
    assert position.token_ids[0] == token_id
    assert len(position.token_ids) == 1 + count
    assert len(set(position.token_ids[1:])) == count
    assert np.allclose(position.logprobs, expected[list(position.token_ids)], rtol=0, atol=TOLERANCE)
    most_likely = np.sort(expected)[::-1][:count]
    assert np.allclose(position.logprobs[1:], most_likely, rtol=0, atol=TOLERANCE)
    own = expected[token_id]
    assert (expected > own + TOLERANCE).sum() < position.rank <= (expected >= own - TOLERANCE).sum()


def check_request(folder: Path, run: CoreRun, name: str, prompt: Sequence[int], params: SamplingParams) -> None:
    tokens = [*prompt, *run.tokens[name]]
    expected = reference_logprobs(folder, tokens).numpy()
    of_prompt, sampled = run.logprobs.of_prompt.get(name, {}), run.logprobs.sampled.get(name, {})
    vocab_size = expected.shape[-1]
    if params.prompt_logprobs is None:
        assert of_prompt == {}
    else:
        count = vocab_size if params.prompt_logprobs == -1 else params.prompt_logprobs
        assert sorted(of_prompt) == list(range(1, len(prompt)))
        for place, position in of_prompt.items():
            check_position(position, expected[place - 1], tokens[place], count)
    if params.logprobs is None:
        assert sampled == {}
    else:
        count = vocab_size if params.logprobs == -1 else params.logprobs
        assert sorted(sampled) == list(range(len(run.tokens[name])))
        for index, position in sampled.items():
            place = len(prompt) + index
            check_position(position, expected[place - 1], tokens[place], count)


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("shape", SHAPES)
def test_e16_logprobs_are_transformers_whatever_the_chunks_and_preemptions(
    shape: str, loop: str, tiny_llama_dir: Path
) -> None:
    with CoreRun(tiny_llama_dir, loop, *SHAPES[shape]) as run:
        for name, prompt in PROMPTS.items():
            run.add(name, prompt, ASKS)
        run.run()
        assert (run.engine.core.stats().num_preemptions > 0) == (shape == "preempting")
    for name, prompt in PROMPTS.items():
        check_request(tiny_llama_dir, run, name, prompt, ASKS)


def test_e16_each_request_gets_as_many_as_it_asks_for_beside_others(tiny_llama_dir: Path) -> None:
    counts = [(None, None), (0, None), (None, 0), (5, 1), (-1, None), (None, -1), (1, 264), (264, 0)]
    wanted = {f"{logprobs}/{of_prompt}": (logprobs, of_prompt) for logprobs, of_prompt in counts}
    prompt = PROMPTS["p18"]
    with CoreRun(tiny_llama_dir, "scheduler.max_num_batched_tokens=40", "scheduler.max_num_seqs=8") as run:
        params = {
            name: SamplingParams(temperature=0, max_tokens=3, logprobs=logprobs, prompt_logprobs=of_prompt)
            for name, (logprobs, of_prompt) in wanted.items()
        }
        for name in wanted:
            run.add(name, prompt, params[name])
        run.run()
    for name in wanted:
        check_request(tiny_llama_dir, run, name, prompt, params[name])


def test_e16_logprobs_are_of_the_models_own_logits_before_penalties_masks_and_temperature(
    tiny_llama_dir: Path,
) -> None:
    params = SamplingParams(
        temperature=1.7, seed=3, top_p=0.9, repetition_penalty=1.9, presence_penalty=2, max_tokens=9, logprobs=2,
        prompt_logprobs=0, logit_bias={5: 50.0}, allowed_token_ids=[5, 6, 7, 8],
    )  # fmt: skip
    with CoreRun(tiny_llama_dir) as run:
        run.add("odd", PROMPTS["p18"], params)
        run.run()
    assert set(run.tokens["odd"]) <= {5, 6, 7, 8}
    check_request(tiny_llama_dir, run, "odd", PROMPTS["p18"], params)


@pytest.mark.parametrize(("family", "num_groups"), [("mistral", 1), ("gemma3_text", 6), ("gpt_oss", 2)])
@pytest.mark.parametrize("num_blocks", [12, 100])
def test_e16_models_with_window_groups_give_the_same(
    family: str, num_groups: int, num_blocks: int, window_model: Callable[[str], Path]
) -> None:
    """What has left a window, and what the adapter computes in one piece."""
    folder, asks = window_model(family), dataclasses.replace(ASKS, max_tokens=20)
    blocks = f"kv_cache.num_blocks={num_blocks * num_groups}"  # of all groups together
    with CoreRun(folder, *SHAPES["budget 7"], "engine=overlap", blocks) as run:
        for name, prompt in PROMPTS.items():
            run.add(name, prompt, asks)
        run.run()
        assert (run.engine.core.stats().num_preemptions > 0) == (num_blocks == 12)
    for name, prompt in PROMPTS.items():
        check_request(folder, run, name, prompt, asks)


@pytest.mark.parametrize("loop", LOOPS)
def test_k5_kv_08_prompt_logprobs_are_full_and_the_same_with_a_warm_prefix_cache(
    loop: str, tiny_llama_dir: Path
) -> None:
    prompt = PROMPTS["p40"]
    with CoreRun(tiny_llama_dir, loop) as run:
        for name, params in (("cold", ASKS), ("warm", ASKS), ("plain", SamplingParams(temperature=0, max_tokens=6))):
            run.add(name, prompt, params)
            run.run()
    assert run.num_cached == {"cold": 0, "warm": 0, "plain": 36}
    assert run.logprobs.of_prompt["cold"] == run.logprobs.of_prompt["warm"]
    assert run.tokens["cold"] == run.tokens["warm"] == run.tokens["plain"]
    check_request(tiny_llama_dir, run, "warm", prompt, ASKS)


def test_asking_for_logprobs_changes_no_token_of_anybody(tiny_llama_dir: Path) -> None:
    tokens = []
    for asks in (False, True):
        with CoreRun(tiny_llama_dir, "scheduler.max_num_batched_tokens=16", "scheduler.max_num_seqs=4") as run:
            for index, (name, prompt) in enumerate(PROMPTS.items()):
                params = SamplingParams(temperature=0.8, seed=index, max_tokens=8)
                more = dataclasses.replace(params, logprobs=3, prompt_logprobs=1)
                run.add(name, prompt, more if asks and index % 2 else params)
            tokens.append(run.run().tokens)
    assert tokens[0] == tokens[1]


FAULTS: dict[str, dict[str, object]] = {
    "a processor that refuses it": {"extra_args": {"no_repeat_ngram_size": "three"}},
    "masks that leave no token": {"allowed_token_ids": [5], "bad_words": ["five"]},
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("fault", FAULTS)
def test_one_bad_request_among_64_fails_alone_and_the_others_get_the_same_tokens(
    fault: str, loop: str, tiny_llama_dir: Path
) -> None:
    def run_64(bad: SamplingParams) -> CoreRun:
        with CoreRun(tiny_llama_dir, loop, "logits_processors=[no_repeat_ngram]", "kv_cache.num_blocks=700") as run:
            for index in range(64):
                prompt = window_models.prompt_of(3 + index % 11, seed=index)
                more: dict[str, object] = {"logprobs": 1, "prompt_logprobs": 0} if index % 3 == 0 else {}
                if index % 4 == 1:
                    more["extra_args"] = {"no_repeat_ngram_size": 2}
                good = SamplingParams(temperature=0.9 * (index % 2), max_tokens=6, **more)  # type: ignore[arg-type]
                run.add(f"r{index}", prompt, bad if index == 20 else good, bad_words_token_ids=((5,),))
            return run.run()

    plain = run_64(SamplingParams(temperature=0, max_tokens=6))
    spoilt = run_64(SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1, **FAULTS[fault]))  # type: ignore[arg-type]
    assert [name for name, reason in spoilt.ends.items() if reason is FinishReason.ERROR] == ["r20"]
    assert spoilt.tokens.pop("r20") == []
    assert len(plain.tokens.pop("r20")) == 6
    assert spoilt.errors["r20"]
    assert spoilt.tokens == plain.tokens
    assert spoilt.logprobs.sampled.keys() - {"r20"} == plain.logprobs.sampled.keys() - {"r20"}
    stats = spoilt.engine.core.stats()
    assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_total_blocks)
