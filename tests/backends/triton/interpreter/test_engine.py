"""Whole engines whose attention runs in the interpreter: greedy tokens are those of torch_native."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import tiny_models
import window_models
from tokenyard import LLM, SamplingParams
from window_models import prompt_of

GREEDY = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
SHARED = prompt_of(18, seed=99)
PROMPTS = [prompt_of(3, seed=3), SHARED, SHARED + prompt_of(2, seed=5)]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Callable[[str], Path]:
    root = tmp_path_factory.mktemp("models")

    def write(name: str) -> Path:
        if name in window_models.FAMILIES:
            return window_models.write_window_model(root / name, name, tiny_llama_dir)
        return tiny_models.write_model(root / name, tiny_models.RUNNING[name], tiny_llama_dir)

    return write


def greedy(model: Path, attention: str, *overrides: str) -> list[list[int]]:
    base = [f"attention={attention}", "kv_cache.num_blocks=300", "scheduler.max_num_seqs=2", *overrides]
    with LLM(model, dtype="float32", max_model_len=64, overrides=base) as llm:
        assert llm.engine.report.attention_backend == attention
        return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in ("llama", "gemma2")]


@pytest.mark.parametrize("name", ["gemma3_text", "gpt_oss", *SLOW])
def test_greedy_tokens_are_those_of_torch_native(name: str, model_of: Callable[[str], Path]) -> None:
    """Prompts in chunks beside decoding requests, one of them begun from the prefix cache; splits of a few tokens.

    gemma3_text has windows on five of six layers; gpt_oss sinks, and windows on every other layer; gemma2 a soft cap.
    """
    model = model_of(name)
    found = greedy(
        model, "triton", "attention.split_tokens=8", "kv_cache.block_size=8", "scheduler.max_num_batched_tokens=14"
    )
    expected = greedy(model, "torch_native")
    assert found == expected
    assert len({tuple(tokens) for tokens in expected}) == len(PROMPTS)  # else the equality would mean little
