"""LLM: where sampling gets its defaults, its seed and its end-of-sequence tokens from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenyard import LLM, SamplingParams
from tokenyard.engine.input_processor import InputProcessor, TokenizedPrompt
from tokenyard.errors import ValidationError
from tokenyard.request import EngineCoreRequest

OVERRIDES = ["kv_cache.num_blocks=16"]
ALL = {"temperature": 0.6, "top_p": 0.8, "top_k": 20}

MakeModel = Callable[..., Path]


@pytest.fixture
def model_with(make_llama: Callable[..., Path]) -> MakeModel:
    """Writes the tiny model with values in generation_config.json; config.json names only token 2 as EOS."""

    def make(**values: object) -> Path:
        folder = make_llama()
        (folder / "generation_config.json").write_text(json.dumps(values))
        return folder

    return make


def tokens(llm: LLM, prompts: str | Sequence[str], params: SamplingParams | None) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]


@pytest.mark.parametrize("index", [0, 3])
def test_smp_10_every_eos_token_of_generation_config_ends_a_request(
    tiny_llama_dir: Path, model_with: MakeModel, index: int
) -> None:
    """SMP-10: a token that only generation_config lists is sampled; ignore_eos ignores all that are listed."""
    params = SamplingParams(temperature=0, max_tokens=6)
    ignoring = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    with LLM(tiny_llama_dir, overrides=OVERRIDES) as llm:
        (unlimited,) = tokens(llm, "the hi", ignoring)
    eos = unlimited[index]
    assert eos != 2
    with LLM(model_with(eos_token_id=[2, 0, eos]), overrides=OVERRIDES) as llm:
        completion = llm.generate("the hi", params, use_tqdm=False)[0].outputs[0]
        assert completion.token_ids == unlimited[: unlimited.index(eos) + 1]
        assert (completion.finish_reason, completion.stop_reason) == ("stop", None)
        assert llm.engine.core.stats().num_generation_tokens == len(completion.token_ids)
        assert tokens(llm, "the hi", ignoring) == [unlimited]


def test_an_eos_token_outside_the_vocabulary_ends_nothing(model_with: MakeModel) -> None:
    with LLM(model_with(eos_token_id=[2, 10**6]), overrides=OVERRIDES) as llm:
        assert len(tokens(llm, "hi", SamplingParams(temperature=0, max_tokens=4, min_tokens=3))[0]) >= 3


def test_unseeded_sampling_follows_model_seed_and_else_the_seed(tiny_llama_dir: Path) -> None:
    params = SamplingParams(max_tokens=12, ignore_eos=True)

    def sampled(seed: int, *overrides: str) -> list[list[int]]:
        with LLM(tiny_llama_dir, seed=seed, overrides=[*OVERRIDES, *overrides]) as llm:
            return tokens(llm, ["hi", "the"], params)

    of_seed = [sampled(seed) for seed in range(3)]
    assert sampled(1) == of_seed[1]
    assert of_seed[0] != of_seed[1] != of_seed[2] != of_seed[0]
    assert sampled(1, "model.seed=2") == of_seed[2]
    assert sampled(1, "model.seed=0") == of_seed[0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, SamplingParams()),
        ({"temperature": 0.6}, SamplingParams(temperature=0.6)),
        ({"top_p": 0.8}, SamplingParams(top_p=0.8)),
        ({"top_k": 20}, SamplingParams(top_k=20)),
        ({"max_new_tokens": 33}, SamplingParams(max_tokens=33)),
        ({**ALL, "do_sample": True}, SamplingParams(temperature=0.6, top_p=0.8, top_k=20)),
        ({**ALL, "do_sample": False}, SamplingParams(temperature=0)),
        (dict.fromkeys(ALL), SamplingParams()),
    ],
    ids=lambda value: " ".join(value) or "nothing" if isinstance(value, dict) else "",
)
def test_the_default_sampling_parameters_are_those_of_generation_config(
    model_with: MakeModel, values: dict[str, object], expected: SamplingParams
) -> None:
    with LLM(model_with(**values), overrides=OVERRIDES) as llm:
        assert llm.get_default_sampling_params() == expected


def test_a_request_without_parameters_takes_the_models_own(model_with: MakeModel) -> None:
    with LLM(model_with(top_k=1), overrides=OVERRIDES) as llm:
        greedy = SamplingParams(temperature=0)
        assert tokens(llm, ["the hi", "hi"], None) == tokens(llm, ["the hi", "hi"], greedy)


def test_s13_e8_a_stop_token_ends_a_request_without_its_text(tiny_llama_dir: Path) -> None:
    """E8: the token is in token_ids and not in the text; the others of the batch go on."""
    free = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    with LLM(tiny_llama_dir, overrides=OVERRIDES) as llm:
        unlimited = llm.generate("the hi", free, use_tqdm=False)[0].outputs[0]
        stop = unlimited.token_ids[3]
        first = unlimited.token_ids.index(stop)
        stopping = dataclasses.replace(free, stop_token_ids=[stop])
        stopped, other = llm.generate(["the hi"] * 2, [stopping, free], use_tqdm=False)
        completion = stopped.outputs[0]
        assert completion.token_ids == unlimited.token_ids[: first + 1]
        assert completion.text == llm.get_tokenizer().decode(unlimited.token_ids[:first])
        assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
        assert other.outputs[0] == unlimited


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_s13_nothing_ends_a_request_before_min_tokens(tiny_llama_dir: Path, temperature: float) -> None:
    """S13: stop tokens are not even sampled; the first one after that ends the request."""
    free = SamplingParams(temperature=temperature, seed=3, max_tokens=40, ignore_eos=True)
    with LLM(tiny_llama_dir, overrides=OVERRIDES) as llm:
        sampled = llm.generate("the hi", free, use_tqdm=False)[0].outputs[0].token_ids
        stop_ids = sorted(set(sampled[:3]))
        for min_tokens in (0, 1, 5):
            params = dataclasses.replace(free, stop_token_ids=stop_ids, min_tokens=min_tokens)
            together = llm.generate(["the hi", "hi"], [params, free], use_tqdm=False)
            completion = together[0].outputs[0]
            *before, last = completion.token_ids
            assert not set(before) & set(stop_ids)
            assert len(before) >= min_tokens
            assert (last in stop_ids) == (completion.finish_reason == "stop")
            if min_tokens == 0:
                assert completion.token_ids == sampled[:1]


def test_s13_eos_is_not_sampled_before_min_tokens(tiny_llama_dir: Path, model_with: MakeModel) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=12)
    with LLM(tiny_llama_dir, overrides=OVERRIDES) as llm:
        (unlimited,) = tokens(llm, "the hi", dataclasses.replace(greedy, ignore_eos=True))
    with LLM(model_with(eos_token_id=[2, unlimited[2]]), overrides=OVERRIDES) as llm:
        assert tokens(llm, "the hi", greedy) == [unlimited[: unlimited.index(unlimited[2]) + 1]]
        (longer,) = tokens(llm, "the hi", dataclasses.replace(greedy, min_tokens=6))
        assert len(longer) >= 6
        assert not {2, unlimited[2]} & set(longer[:6])
        (exact,) = tokens(llm, "the hi", dataclasses.replace(greedy, min_tokens=12))
        assert len(exact) == 12


def test_s13_min_tokens_holds_when_a_request_is_preempted(tiny_llama_dir: Path) -> None:
    """The tokens are those of a roomy pool, although requests start anew with what they have."""
    params = SamplingParams(temperature=0, max_tokens=24, min_tokens=16, stop_token_ids=[*range(2, 250, 2)])
    prompts = [[5 + index] * 10 for index in range(4)]

    def run(num_blocks: int) -> tuple[list[list[int]], int]:
        overrides = ["kv_cache.block_size=4", f"kv_cache.num_blocks={num_blocks}"]
        with LLM(tiny_llama_dir, max_model_len=40, overrides=overrides) as llm:
            found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
            return found, llm.engine.core.stats().num_preemptions

    roomy, none = run(100)
    tight, some = run(12)
    assert (none, some > 0) == (0, True)
    assert tight == roomy
    assert all(not set(row[:16]) & set(params.stop_token_ids or ()) for row in roomy)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"stop_token_ids": [5, 999]}, r"stop_token_ids: token id 999 is outside the vocabulary, 0 to \d+"),
        (
            {"min_tokens": 2**31},
            r"min_tokens=2147483648 is more than the 254 tokens that model\.max_model_len=256 leaves",
        ),
        ({"min_tokens": 255}, r"min_tokens=255 is more than the 254 tokens"),
    ],
)
def test_d9_d10_what_a_model_cannot_meet_is_refused_before_anything_is_queued(
    tiny_llama_dir: Path, params: dict[str, object], message: str
) -> None:
    """D9: ids outside the vocabulary. D10: a min_tokens that no request can reach."""
    with LLM(tiny_llama_dir, overrides=OVERRIDES) as llm:
        fine = SamplingParams(max_tokens=2)
        wrong = SamplingParams(max_tokens=None, **params)  # type: ignore[arg-type]
        with pytest.raises(ValidationError, match=message):
            llm.generate([[5, 6], [7, 8]], [fine, wrong], use_tqdm=False)
        assert not llm.engine.core.has_requests()
        assert llm.generate([[5, 6]], SamplingParams(max_tokens=None, min_tokens=250), use_tqdm=False)[0].finished


def test_a_stop_token_that_is_eos_gives_no_stop_reason_unless_eos_is_ignored(tiny_llama_dir: Path) -> None:
    def request(**params: object) -> EngineCoreRequest:
        inputs = InputProcessor(tokenizer=llm.get_tokenizer(), max_model_len=256, vocab_size=100, eos_token_ids=[2, 0])
        (request,) = inputs.make_requests("r", TokenizedPrompt(None, [5]), SamplingParams(**params), 0.0)  # type: ignore[arg-type]
        return request

    with LLM(tiny_llama_dir, overrides=OVERRIDES) as llm:
        both = request(stop_token_ids=[7, 2, 7])
        assert (both.stop_token_ids, both.eos_token_ids) == ((2, 0, 7), (2, 0))
        ignoring = request(stop_token_ids=[7, 2], ignore_eos=True)
        assert (ignoring.stop_token_ids, ignoring.eos_token_ids) == ((7, 2), ())


@pytest.mark.parametrize(("block_size", "num_blocks"), [(1, 70), (4, 24), (16, 8)])
def test_s7_a_step_too_many_for_an_ended_request_touches_nobody_else(
    tiny_llama_dir: Path, block_size: int, num_blocks: int
) -> None:
    """S7: requests end at stop tokens and at the model's limit, at any place in a block, while a step is in flight."""
    prompts = [[(7 * row + column) % 250 + 3 for column in range(1 + row % 9)] for row in range(24)]
    params = [
        SamplingParams(temperature=0.8, seed=row, max_tokens=None, stop_token_ids=[*range(row % 3, 268, 9)])
        for row in range(24)
    ]

    def run(engine: str) -> list[tuple[list[int], str, str | None, object]]:
        overrides = [f"kv_cache.num_blocks={num_blocks}", "scheduler.max_num_seqs=6"]
        with LLM(tiny_llama_dir, engine=engine, block_size=block_size, max_model_len=20, overrides=overrides) as llm:
            outputs = [output.outputs[0] for output in llm.generate(prompts, params, use_tqdm=False)]
            stats = llm.engine.core.stats()
            assert stats.num_free_blocks == stats.num_total_blocks
            return [(row.token_ids, row.text, row.finish_reason, row.stop_reason) for row in outputs]

    found = run("sync")
    assert run("overlap") == found
    assert {reason for _, _, reason, _ in found} == {"stop", "length"}
    assert all(
        len(prompt) + len(row[0]) == 20 for prompt, row in zip(prompts, found, strict=True) if row[2] == "length"
    )
