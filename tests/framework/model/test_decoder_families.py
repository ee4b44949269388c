"""The fast decoder of every family, as checkpoints of transformers come in: the logits and tokens of transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import family_models
import pytest
import torch
import transformers
from family_models import CASES, ORIGINAL, WINDOW, make_model, prompt_of, transformers_greedy
from lone_logits import logits_of
from teacher_forcing import bfloat16_differences
from tokenyard import LLM, SamplingParams
from tokenyard.errors import ValidationError
from tokenyard.model.adapter import TransformersAdapter
from tokenyard.model.decoder import FastDecoder
from tokenyard.model.decoder_config import parse_decoder_config
from tokenyard.model.files import resolve_model
from tokenyard.model.hf_attention import ATTENTION_NAME, register
from tokenyard.model.loader import load_model
from tokenyard.model.self_check import PackedReference, Part
from tokenyard.model.weights import open_weights

if TYPE_CHECKING:
    from tokenyard.model.causal_lm import PagedAttention

CPU = torch.device("cpu")
# Multipliers are applied in one rounding here, in two there.
ROUNDED_OTHERWISE = [name for name in CASES if name.startswith("granite")]
MakeFolder = Callable[[str], Path]


@pytest.fixture(scope="module")
def family_model(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> MakeFolder:
    """A function that gives the folder of a case, written when it is first asked for."""
    folders: dict[str, Path] = {}

    def folder_of(case: str) -> Path:
        if case not in folders:
            folders[case] = family_models.write_model(tmp_path_factory.mktemp("family"), case, tiny_llama_dir)
        return folders[case]

    return folder_of


def load_plain(folder: Path) -> FastDecoder:
    files = resolve_model(str(folder))
    with open_weights(files) as weights:
        config = parse_decoder_config(files.config)
        return FastDecoder(config, weights, dtype=torch.float32, device=CPU, pack=False)


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_float32_logits_equal_transformers(case: str, family_model: MakeFolder) -> None:
    folder = family_model(case)
    model = load_model(resolve_model(str(folder)), dtype=torch.float32, device=CPU)
    assert parse_decoder_config(family_models.saved_config(folder)).num_parameters == sum(
        parameter.numel() for parameter in make_model(case).parameters()
    )
    assert model.description == f"fast decoder ({CASES[case].model_type})"
    tokens = torch.tensor(prompt_of(50, seed=1))
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager")
    expected = reference(tokens[None], use_cache=False).logits[0]
    assert expected.argmax(-1).unique().numel() > 10
    limit = 1e-5 * expected.abs().max()
    assert (logits_of(model, tokens) - expected).abs().max() <= limit
    assert (logits_of(load_plain(folder), tokens) - expected).abs().max() <= limit


@pytest.mark.parametrize("case", [name for name in CASES if name not in ROUNDED_OTHERWISE])
@torch.inference_mode()
def test_plain_linears_are_bit_identical_to_transformers_with_the_same_attention(
    case: str, family_model: MakeFolder
) -> None:
    model = make_model(case)
    register()
    model.set_attn_implementation(ATTENTION_NAME)
    tokens = torch.tensor(prompt_of(40, seed=2))
    assert torch.equal(logits_of(load_plain(family_model(case)), tokens), logits_of(TransformersAdapter(model), tokens))


NUM_TOKENS = 12
SHARED = prompt_of(20, seed=99)
PROMPTS = [
    *(prompt_of(length, seed=length) for length in (1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 33)),
    *(SHARED + prompt_of(length, seed=length) for length in (1, 9, 14)),
    SHARED,
]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def greedy(folder: Path, prompts: list[list[int]]) -> list[list[int]]:
    return [transformers_greedy(folder, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_are_transformers_in_chunks_and_from_the_cache(case: str, family_model: MakeFolder) -> None:
    folder = family_model(case)
    expected = greedy(folder, PROMPTS)
    assert len({tuple(tokens) for tokens in expected}) > len(PROMPTS) // 2
    with LLM(
        folder,
        block_size=4,
        max_num_batched_tokens=7,
        overrides=["kv_cache.num_blocks=400", "scheduler.max_num_seqs=5"],
    ) as llm:
        for _ in range(2):  # the second time from the cache
            outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            assert [list(output.outputs[0].token_ids) for output in outputs] == expected
        assert llm.engine.core.stats().prefix_cache_hits > 0


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_survive_preemption(case: str, family_model: MakeFolder) -> None:
    folder = family_model(case)
    config = parse_decoder_config(family_models.saved_config(folder))
    num_groups = 1 if len(set(config.windows)) == 1 else config.num_layers
    with LLM(
        folder,
        engine="overlap",
        block_size=4,
        max_num_batched_tokens=64,
        max_model_len=ORIGINAL,
        enable_prefix_caching=False,
        overrides=[f"kv_cache.num_blocks={16 * num_groups}", "scheduler.max_num_seqs=6"],
    ) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        assert [list(output.outputs[0].token_ids) for output in outputs] == greedy(folder, PROMPTS)
        assert llm.engine.core.stats().num_preemptions > 0


DYNAMIC = [name for name in CASES if "dynamic" in name]


@pytest.mark.parametrize("case", DYNAMIC)
def test_dynamic_rope_goes_on_beyond_its_original_length_as_transformers_decodes(
    case: str, family_model: MakeFolder
) -> None:
    """Whatever a request's batch mates are, however it is cut, cached, preempted and computed again."""
    folder = family_model(case)
    prompts = [SHARED, *(SHARED + prompt_of(length - len(SHARED), seed=length) for length in (40, 50, 63, 64))]
    expected = [transformers_greedy(folder, prompt, 48) for prompt in prompts]
    params = SamplingParams(temperature=0, max_tokens=48, ignore_eos=True)
    for budget, blocks in ((7, 400), (128, 62)):
        overrides = [f"kv_cache.num_blocks={blocks}", "scheduler.max_num_seqs=5"]
        with LLM(folder, block_size=4, max_num_batched_tokens=budget, overrides=overrides) as llm:
            assert llm.engine.max_model_len == 2 * ORIGINAL
            for _ in range(2):
                outputs = llm.generate(prompts, params, use_tqdm=False)
                assert [list(output.outputs[0].token_ids) for output in outputs] == expected
            stats = llm.engine.core.stats()
            assert stats.prefix_cache_hits > 0
            assert (stats.num_preemptions > 0) == (blocks < 100)


def test_a_prompt_beyond_the_original_length_of_dynamic_rope_is_refused_by_name(family_model: MakeFolder) -> None:
    with LLM(family_model(DYNAMIC[0])) as llm:
        message = "the prompt has 65 tokens; with its dynamic RoPE scaling this model takes at most 64"
        with pytest.raises(ValidationError, match=message):
            llm.generate([SHARED, prompt_of(ORIGINAL + 1, seed=1)], GREEDY, use_tqdm=False)
        assert len(llm.generate(prompt_of(ORIGINAL, seed=1), GREEDY, use_tqdm=False)) == 1


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_a_sequences_float32_logits_are_the_same_bits_alone_and_among_others(
    case: str, family_model: MakeFolder
) -> None:
    model = load_model(resolve_model(str(family_model(case))), dtype=torch.float32, device=CPU)
    first, second, third = (torch.tensor(prompt_of(length, seed=length)) for length in (21, 9, 1))
    attention = PackedReference(model.shape.layers)
    attention.begin_step([Part(1, 0, 9), Part(0, 9, 30), Part(2, 30, 31)])
    tokens = torch.cat((second, first, third))
    positions = torch.cat([torch.arange(len(sequence)) for sequence in (second, first, third)])
    packed = model.forward(tokens, positions, torch.arange(31), cast("PagedAttention", attention))
    assert torch.equal(packed[9:30], logits_of(model, first))


@pytest.mark.parametrize("case", CASES)
@torch.inference_mode()
def test_bfloat16_rounds_no_more_than_transformers(case: str, family_model: MakeFolder) -> None:
    folder = family_model(case)
    model = load_model(resolve_model(str(folder)), dtype=torch.bfloat16, device=CPU)
    bfloat16_differences(folder, prompt_of(20, seed=3), 30, partial(logits_of, model)).check()


@torch.inference_mode()
def test_bfloat16_of_the_default_model_rounds_no_more_than_transformers(default_model_dir: Path) -> None:
    model = load_model(resolve_model(str(default_model_dir)), dtype=torch.bfloat16, device=CPU)
    prompt = list(range(1000, 1024))
    bfloat16_differences(default_model_dir, prompt, 12, partial(logits_of, model)).check()


@torch.inference_mode()
def test_teacher_forcing_finds_a_wrong_window_norm_and_rotation(family_model: MakeFolder) -> None:
    folder = family_model("qwen3 with biases and windows")
    files = resolve_model(str(folder))
    changes: list[dict[str, object]] = [{"sliding_window": WINDOW + 1}, {"rms_norm_eps": 0.1}, {"rope_theta": 2e4}]
    for change in changes:
        changed = replace(files, config={**files.config, "rope_parameters": None, **change})
        model = load_model(changed, dtype=torch.bfloat16, device=CPU)
        differences = bfloat16_differences(folder, prompt_of(20, seed=3), 30, partial(logits_of, model))
        with pytest.raises(AssertionError):
            differences.check()
