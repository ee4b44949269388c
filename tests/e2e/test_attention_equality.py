"""In float32 an attention backend changes no greedy token, whatever layers ask and however steps are cut."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import pytest
import tiny_models
import window_models
from tokenyard import LLM, SamplingParams
from window_models import prompt_of

Tokens = list[list[int]]
NUM_TOKENS = 8
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
SETTINGS = {
    "a prefix cache": ["kv_cache.enable_prefix_caching=true"],
    "chunks of 5": ["scheduler.max_num_batched_tokens=5", "kv_cache.enable_prefix_caching=false"],
    "chunks from the cache": ["scheduler.max_num_batched_tokens=6", "kv_cache.enable_prefix_caching=true"],
    "blocks of 1": ["kv_cache.block_size=1", "kv_cache.num_blocks=4000"],
    "blocks of 64": ["kv_cache.block_size=64", "kv_cache.enable_prefix_caching=false"],
}
ENGINES = ("sync", "overlap")
SHARED = prompt_of(24, seed=99)
PROMPTS = [
    *(prompt_of(length, seed=length) for length in (1, 7, 8, 9, 16, 33, 40)),
    *(SHARED + prompt_of(length, seed=length) for length in (1, 9)),
    SHARED,
]


def greedy(model: Path | str, prompts: Sequence[str] | Sequence[list[int]], *overrides: str) -> Tokens:
    """Tokens of every prompt; twice, so that the second time finds what the first one has cached."""
    base = ["kv_cache.num_blocks=600", "kv_cache.block_size=4", "scheduler.max_num_seqs=5"]
    with LLM(model, dtype="float32", max_model_len=64, overrides=[*base, *overrides]) as llm:
        report = llm.engine.report
        assert f"attention={report.attention_backend}" in overrides
        if report.attention_description.startswith("torch_native"):
            pytest.skip(f"{report.attention_backend} runs as {report.attention_description}")
        runs = [
            [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY, use_tqdm=False)] for _ in range(2)
        ]
        stats = llm.engine.core.stats()
        assert stats.num_free_blocks == stats.num_total_blocks
    assert runs[0] == runs[1]
    return runs[0]


@pytest.fixture(scope="module")
def model_of(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Callable[[str], Path]:
    """Writes a tiny random model once: of a family with windows or sinks, or `gemma2` with its soft cap."""
    root = tmp_path_factory.mktemp("models")

    def write(name: str) -> Path:
        folder = root / name
        if folder.exists():
            return folder
        if name in tiny_models.RUNNING:
            return tiny_models.write_model(folder, tiny_models.RUNNING[name], tiny_llama_dir)
        return window_models.write_window_model(folder, name.removesuffix(", windows"), tiny_llama_dir)

    return write


@pytest.fixture(scope="module")
def baseline(model_of: Callable[[str], Path]) -> Callable[[str], Tokens]:
    """What torch_native gives, whole prompts and no cache; its own equality with transformers has tests elsewhere."""

    @cache
    def of(name: str) -> Tokens:
        return greedy(model_of(name), PROMPTS, "attention=torch_native", "kv_cache.enable_prefix_caching=false")

    return of


TINY = {
    "gemma3_text, windows": "windows on five of six layers",
    "gpt_oss, windows": "sinks, windows on every other layer",
    "gemma2": "soft cap, windows on two of three layers",
    "llama": "full attention",
}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("name", TINY)
def test_cpu_native_gives_torch_natives_tokens(
    name: str, setting: str, engine: str, model_of: Callable[[str], Path], baseline: Callable[[str], Tokens]
) -> None:
    overrides = ["attention=cpu_native", f"engine={engine}", *SETTINGS[setting]]
    assert greedy(model_of(name), PROMPTS, *overrides) == baseline(name)


def test_the_models_give_different_tokens_to_different_prompts(baseline: Callable[[str], Tokens]) -> None:
    """Else their equality would mean nothing."""
    for name in TINY:
        assert len({tuple(tokens) for tokens in baseline(name)}) >= len(PROMPTS) - 1, name


# ---- triton, in its interpreter --------------------------------------------------------------------------------------

_INTERPRETED = """
import json, sys
from tokenyard import LLM, SamplingParams
model, prompts, count, overrides = json.loads(sys.argv[1])
params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
with LLM(model, dtype="float32", max_model_len=64, overrides=overrides) as llm:
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print(json.dumps([llm.engine.report.attention_backend, [output.outputs[0].token_ids for output in outputs]]))
"""


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        pytest.param(
            *("gemma3_text", ["scheduler.max_num_batched_tokens=16", "engine=overlap", "kv_cache.block_size=4"]),
            marks=pytest.mark.slow,
        ),
        ("gpt_oss", ["kv_cache.block_size=16"]),
        ("gemma2", ["kv_cache.enable_prefix_caching=false", "kv_cache.block_size=4"]),
    ],
)
def test_triton_in_its_interpreter_gives_torch_natives_tokens(
    name: str, overrides: list[str], model_of: Callable[[str], Path]
) -> None:
    """In a process of its own: the interpreter is chosen when triton is imported."""
    prompts, count = [PROMPTS[1], PROMPTS[5]], 4
    expected = [tokens[:count] for tokens in greedy(model_of(name), prompts, "attention=torch_native")]
    given = ["attention=triton", "kv_cache.num_blocks=200", "scheduler.max_num_seqs=4", *overrides]
    done = subprocess.run(
        [sys.executable, "-c", _INTERPRETED, json.dumps([str(model_of(name)), prompts, count, given])],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == ["triton", expected]


# ---- The default model -----------------------------------------------------------------------------------------------

_CLERK = "The clerk at the harbour office writes down every ship that arrives, where it came from and "
TEXTS = [
    *(_CLERK + f"today the {ship}" for ship in ("first", "second", "last")),
    "Rivers are made of",
    "2, 4, 6, 8, 10, 12",
    "def area(width, height):\n    return",
    "A",
    "To be or not to be, that is the",
]


@pytest.fixture(scope="module")
def default_baseline(default_model_dir: Path) -> Tokens:
    return greedy("smollm2-135m", TEXTS, "attention=torch_native", "kv_cache.enable_prefix_caching=false")


@pytest.mark.parametrize(
    "overrides",
    [
        ["kv_cache.block_size=16", "kv_cache.enable_prefix_caching=true"],
        ["scheduler.max_num_batched_tokens=7", "engine=overlap", "kv_cache.enable_prefix_caching=false"],
        pytest.param(["kv_cache.block_size=1", "kv_cache.num_blocks=2400"], marks=pytest.mark.slow),
        pytest.param(["kv_cache.block_size=64", "engine=overlap"], marks=pytest.mark.slow),
        pytest.param(["executor.num_threads=2"], marks=pytest.mark.slow),
    ],
    ids=" ".join,
)
def test_cpu_native_gives_the_default_models_tokens(default_baseline: Tokens, overrides: list[str]) -> None:
    assert greedy("smollm2-135m", TEXTS, "attention=cpu_native", *overrides) == default_baseline
