"""size_kv_cache: blocks and the greatest length, from memory or from a number of blocks."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard import LLM, SamplingParams
from tokenyard.config import EngineConfig, KVCacheConfig, ModelConfig, SchedulerConfig
from tokenyard.errors import CapacityError, ConfigError, ValidationError
from tokenyard.interfaces import KVCacheGroupSpec, WorkerReport
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.launch.cache_size import CacheSize, size_kv_cache
from tokenyard.launch.checks import check_config

MODEL_LIMIT = 256


def report(available_bytes: int, groups: list[tuple[int, int | None]]) -> WorkerReport:
    """Of a model with (bytes per token, window) groups."""
    return WorkerReport(
        kv_cache_groups=[
            KVCacheGroupSpec(num_layers=1, bytes_per_token=count, sliding_window=window) for count, window in groups
        ],
        available_bytes=available_bytes,
        vocab_size=10,
        decoder="",
        attention_backend="",
        device="cpu",
        dtype="float32",
        load_seconds=0.0,
    )


def config(*, max_model_len: int | None = None, max_num_seqs: int = 4, **kv_cache: int | str | None) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(max_model_len=max_model_len),
        scheduler=SchedulerConfig(max_num_seqs=max_num_seqs),
        kv_cache=KVCacheConfig(**{"block_size": 16, **kv_cache}),  # type: ignore[arg-type]
    )


def test_u7_a_pool_from_memory_that_cannot_hold_the_longest_request_is_an_error_with_the_numbers() -> None:
    one_group = report(1000 * 16 * 16, [(1000, None)])  # 16 blocks, of which one is never used
    with pytest.raises(CapacityError) as caught:
        size_kv_cache(config(), one_group, MODEL_LIMIT)
    for part in (
        "room for 15 blocks of 16 tokens",
        "0.24 MiB at 16000 bytes each",
        "max_model_len=256 tokens needs 16",
    ):
        assert part in str(caught.value)
    assert size_kv_cache(config(max_model_len=240), one_group, MODEL_LIMIT) == CacheSize(15, 240)


def test_u7_minus_one_takes_the_length_that_fits_up_to_the_models_own() -> None:
    for num_blocks, expected in ((15, 240), (1, 16), (16, 256), (40, 256)):
        fitted = report(1000 * 16 * (num_blocks + 1), [(1000, None)])
        assert size_kv_cache(config(max_model_len=-1), fitted, MODEL_LIMIT).max_model_len == expected
        explicit = config(max_model_len=-1, num_blocks=num_blocks)
        assert size_kv_cache(explicit, report(0, [(1000, None)]), MODEL_LIMIT) == CacheSize(num_blocks, expected)


@pytest.mark.parametrize("kv_cache", [{"memory": "1KiB"}, {"num_blocks": 1, "block_size": 1}, {"num_blocks": 1}])
def test_u7_minus_one_is_an_error_where_not_even_two_tokens_fit(kv_cache: dict[str, int]) -> None:
    groups = [(1000, None)] if kv_cache.get("block_size") == 1 else [(1000, None), (1000, 8)]
    with pytest.raises(CapacityError, match=r"max_model_len=-1 finds no length that fits: .* needs 2; raise"):
        size_kv_cache(config(max_model_len=-1, **kv_cache), report(1024, groups), MODEL_LIMIT)


def test_u7_an_explicit_number_of_blocks_only_warns(caplog: pytest.LogCaptureFixture) -> None:
    size = size_kv_cache(config(num_blocks=7), report(0, [(1000, None), (1000, 8)]), MODEL_LIMIT)
    assert size == CacheSize(7, MODEL_LIMIT)
    assert "kv_cache.num_blocks=7 holds 48 tokens, below model.max_model_len=256" in caplog.text


def test_a_block_costs_what_it_costs_in_the_largest_group_and_every_group_needs_its_own() -> None:
    uneven = report(96 * 16 * 50, [(96, None), (96, 8), (32, 8)])
    assert size_kv_cache(config(max_model_len=-1), uneven, 10**6) == CacheSize(49, 256)
    assert size_kv_cache(config(max_model_len=64, max_num_seqs=2), uneven, MODEL_LIMIT) == CacheSize(24, 64)


@given(
    num_blocks=st.integers(1, 60),
    block_size=st.integers(1, 20),
    windows=st.lists(st.sampled_from([None, 4, 9]), min_size=1, max_size=4),
)
def test_a_fitted_length_is_what_the_kv_manager_can_hold(
    num_blocks: int, block_size: int, windows: list[int | None]
) -> None:
    manager = PagedKVCacheManager(num_blocks=num_blocks, block_size=block_size, group_windows=windows)
    if manager.capacity_tokens() < 2:
        return
    memory = report((num_blocks + 1) * block_size * 10, [(10, window) for window in windows])
    fitted = config(max_model_len=-1, block_size=block_size)
    assert size_kv_cache(fitted, memory, 10**6) == CacheSize(
        min(num_blocks, 4 * len(windows) * (num_blocks // len(windows))), manager.capacity_tokens()
    )


@pytest.mark.parametrize("length", [-2, 0, 1])
def test_other_lengths_below_two_are_refused(length: int) -> None:
    with pytest.raises(ConfigError, match=r"max_model_len.*at least 2, or null for the model's own limit \(-1: what"):
        check_config(config(max_model_len=length))
    check_config(config(max_model_len=-1))


def test_u7_a_fitted_engine_refuses_what_does_not_fit_and_runs_what_does(
    tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """2 layers of 2 K/V heads of 16 values of 4 bytes: 512 bytes a token, 8192 a block."""
    caplog.set_level(logging.WARNING)
    with LLM(tiny_llama_dir, max_model_len=-1, overrides=["kv_cache.memory=73728"]) as llm:
        assert llm.model_config.max_model_len == 128
        assert llm.engine.num_blocks == 8
        greedy = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
        (output,) = llm.generate([[7] * 100], greedy, use_tqdm=False)
        assert len(output.outputs[0].token_ids) == 28
        with pytest.raises(ValidationError, match=r"the prompt has 128 tokens; model\.max_model_len=128 covers"):
            llm.generate([[7] * 128], greedy, use_tqdm=False)
    assert not caplog.records
    with LLM(tiny_llama_dir, max_model_len=-1) as llm:
        assert llm.model_config.max_model_len == 256
