"""InProcessExecutor: its order of calls, and the functions it publishes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenyard import LLM
from tokenyard.config import AttentionConfig, EngineConfig, ModelConfig
from tokenyard.errors import ConfigError, UnsupportedError
from tokenyard.executor.inproc import InProcessExecutor
from tokenyard.interfaces import ExecutorContext, GrammarOutput, KVCachePlan


@pytest.fixture
def executor(tiny_llama_dir: Path) -> InProcessExecutor:
    made = InProcessExecutor(ExecutorContext())
    report = made.initialize(EngineConfig(model=ModelConfig(name=str(tiny_llama_dir)), attention=AttentionConfig()))
    assert report.decoder == "fast decoder (llama)"
    assert report.attention_backend == "torch_native"
    assert (
        report.kv_cache_groups[0].bytes_per_token == 2 * 2 * 2 * 16 * 4
    )  # layers, K and V, KV heads, head size, float32
    made.allocate_kv_cache(KVCachePlan(num_blocks=4, block_size=16))
    return made


def test_published_functions_can_be_called_and_nothing_else(executor: InProcessExecutor) -> None:
    assert executor.collective_rpc("device_name") == ["cpu"]
    assert executor.collective_rpc("memory_allocated") == [0]
    for name in ("load", "__init__", "_ready", "execute"):
        with pytest.raises(ConfigError, match="device_name, memory_allocated"):
            executor.collective_rpc(name)


def test_sampling_needs_a_step_and_a_grammar_is_refused_by_name(executor: InProcessExecutor) -> None:
    with pytest.raises(RuntimeError, match="without a step"):
        executor.sample_tokens()
    with pytest.raises(UnsupportedError, match="structured outputs"):
        executor.sample_tokens(GrammarOutput(slots=(0,), bitmask=b""))


def test_before_initialize_and_after_shutdown_nothing_runs(executor: InProcessExecutor) -> None:
    executor.check_health()
    executor.shutdown()
    executor.shutdown()
    for other in (executor, InProcessExecutor(ExecutorContext())):
        with pytest.raises(RuntimeError, match="not running"):
            other.check_health()


def test_the_configured_threads_are_those_of_torch(tiny_llama_dir: Path) -> None:
    before = torch.get_num_threads()
    try:
        with LLM(tiny_llama_dir, overrides=["kv_cache.num_blocks=8", f"executor.num_threads={before + 2}"]):
            assert torch.get_num_threads() == before + 2
    finally:
        torch.set_num_threads(before)


def test_the_engine_gives_its_memory_back(tiny_llama_dir: Path) -> None:
    with LLM(tiny_llama_dir, overrides=["kv_cache.num_blocks=8"]) as llm:
        assert llm.engine.report.device == "cpu"
        assert llm.engine.num_blocks == 8
