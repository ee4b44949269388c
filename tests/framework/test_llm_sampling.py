"""LLM: where sampling gets its defaults, its seed and its end-of-sequence tokens from."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenyard import LLM, SamplingParams

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
