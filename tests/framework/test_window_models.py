"""Models with sliding windows, from prompt to tokens: what transformers says, in less memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
import window_models
from tokenyard import LLM, SamplingParams
from window_models import WINDOW, prompt_of, transformers_greedy

NUM_TOKENS = 8
SHARED = prompt_of(24, seed=99)
PROMPTS = [
    *(prompt_of(length, seed=length) for length in (3, 7, 8, 9, 16, 33, 40)),
    *(SHARED + prompt_of(length, seed=length) for length in (1, 9, 14)),
    SHARED,
    SHARED[:20],
]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


def check_idle(llm: LLM) -> None:
    stats = llm.engine.core.stats()
    assert not llm.engine.core.has_requests()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_total_blocks


NUM_GROUPS = {"mistral": 1, "qwen2": 2, "gemma3_text": 6, "gpt_oss": 2}
SETTINGS = [
    # block size, token budget, blocks per KV group, prefix caching, engine loop
    (1, 64, 300, True, "sync"),
    (4, 7, 100, True, "overlap"),
    (4, 64, 16, False, "sync"),
    (4, 5, 16, True, "overlap"),
    (16, 64, 40, False, "overlap"),
    (16, 6, 40, True, "sync"),
]


@pytest.mark.parametrize("family", window_models.FAMILIES)
@pytest.mark.parametrize(("block_size", "budget", "blocks_per_group", "caching", "engine"), SETTINGS)
def test_k20_greedy_tokens_are_transformers(
    family: str,
    block_size: int,
    budget: int,
    blocks_per_group: int,
    caching: bool,
    engine: str,
    window_model: Callable[[str], Path],
) -> None:
    """K20: with hits whose first blocks nobody has any more, chunks, and steps in flight."""
    folder = window_model(family)
    overrides = [f"kv_cache.num_blocks={NUM_GROUPS[family] * blocks_per_group}", "scheduler.max_num_seqs=5"]
    with LLM(
        folder,
        engine=engine,
        block_size=block_size,
        max_num_batched_tokens=budget,
        enable_prefix_caching=caching,
        overrides=overrides,
    ) as llm:
        assert len(llm.engine.report.kv_cache_groups) == NUM_GROUPS[family]
        for _ in range(2):  # the second time from the cache
            found = [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]
            assert found == [transformers_greedy(folder, prompt, NUM_TOKENS) for prompt in PROMPTS]
        stats = llm.engine.core.stats()
        assert (stats.prefix_cache_hits > 0) == caching
        check_idle(llm)


@pytest.mark.parametrize("family", window_models.FAMILIES)
@pytest.mark.parametrize(("engine", "caching"), [("sync", True), ("overlap", True), ("overlap", False)])
def test_s17_preempted_requests_of_window_models_go_on_with_the_same_tokens(
    family: str, engine: str, caching: bool, window_model: Callable[[str], Path]
) -> None:
    """S17: resumed with tables whose beginnings may be nobody's any more."""
    prompts = [prompt_of(3 + seed % 5, seed=seed) for seed in range(8)]
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    overrides = [f"kv_cache.num_blocks={NUM_GROUPS[family] * 8}"]
    with LLM(
        window_model(family), engine=engine, block_size=4, enable_prefix_caching=caching, overrides=overrides
    ) as llm:
        found = [output.outputs[0].token_ids for output in llm.generate(prompts, params, use_tqdm=False)]
        assert found == [transformers_greedy(window_model(family), prompt, 20) for prompt in prompts]
        assert llm.engine.core.stats().num_preemptions > 0
        check_idle(llm)


@pytest.mark.parametrize(("family", "num_full"), [("mistral", 0), ("qwen2", 1), ("gemma3_text", 1)])
@pytest.mark.parametrize("caching", [True, False])
def test_k20_a_window_layer_holds_no_more_blocks_than_its_window_needs(
    family: str, num_full: int, caching: bool, window_model: Callable[[str], Path]
) -> None:
    """K20: while it decodes; a prompt is held whole until it is computed."""
    block_size, prompt = 4, prompt_of(20, seed=1)
    most = -(-WINDOW // block_size) + 1
    overrides = ["kv_cache.num_blocks=200"]
    with LLM(window_model(family), block_size=block_size, enable_prefix_caching=caching, overrides=overrides) as llm:
        num_windowed = len(llm.engine.report.kv_cache_groups) - num_full
        held: list[int] = []

        def look(text: str) -> None:
            stats = llm.engine.core.stats()
            held.append(stats.num_total_blocks - stats.num_free_blocks)

        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        llm.stream(llm.tokenize(prompt), params, look)
        assert len(held) == 40
        for num_output, blocks in enumerate(held[:-1], start=1):  # the last look is after the end
            computed = len(prompt) + num_output - 1
            full = num_full * -(-computed // block_size)
            assert full + num_windowed <= blocks <= full + num_windowed * most
        check_idle(llm)


def test_k20_tables_of_window_layers_only_grow_at_their_end(window_model: Callable[[str], Path]) -> None:
    """K20: what requests hold together stays level although they get longer."""
    with LLM(window_model("mistral"), block_size=4, overrides=["kv_cache.num_blocks=40"]) as llm:
        params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
        prompts = [prompt_of(8, seed=seed) for seed in range(12)]
        outputs = llm.generate(prompts, params, use_tqdm=False)
        # 12 requests of 58 tokens would need 180 blocks without windows.
        assert llm.engine.core.stats().num_preemptions == 0
        for prompt, output in itertools.islice(zip(prompts, outputs, strict=True), 3):
            expected = transformers_greedy(window_model("mistral"), prompt, 50)
            assert output.outputs[0].token_ids == expected
        check_idle(llm)


def test_a_worker_reports_its_groups_and_allocates_as_many_tensors_as_the_largest_has_layers(
    window_model: Callable[[str], Path],
) -> None:
    """4 layers of 2 K/V heads of 8 values of 4 bytes, K and V: 128 bytes a layer and token."""
    folder = window_model("qwen2")
    with LLM(folder, block_size=4, overrides=["kv_cache.memory=20480"], max_model_len=16) as llm:
        report, num_blocks = llm.engine.report, llm.engine.num_blocks
        assert [
            (group.num_layers, group.bytes_per_token, group.sliding_window) for group in report.kv_cache_groups
        ] == [
            (2, 256, None),
            (2, 256, WINDOW),
        ]
        assert num_blocks == 20480 // (4 * 256) - 1
    with LLM(folder, max_model_len=WINDOW, overrides=["kv_cache.num_blocks=9"]) as llm:
        (group,) = llm.engine.report.kv_cache_groups
        assert (group.num_layers, group.sliding_window) == (4, None)
        (output,) = llm.generate([prompt_of(3, seed=3)], SamplingParams(temperature=0, max_tokens=5), use_tqdm=False)
        assert output.outputs[0].token_ids == transformers_greedy(folder, prompt_of(3, seed=3), 5)
