"""The default model in float32: nothing about how requests are scheduled and cached changes a greedy token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from tokenyard import LLM, SamplingParams
from tokenyard.engine_outputs import SchedulerStats

NUM_TOKENS = 12
MAX_MODEL_LEN = 128
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)

_CLERK = "The clerk at the harbour office writes down every ship that arrives, where it came from and what it carries. "
_TOPICS = ("Rivers", "Bread", "Glass", "Bees", "Clocks", "Salt", "Bridges", "Rain", "Paper", "Wool")
PROMPTS = [
    # One beginning of 23 tokens: more than a block of 16.
    *(_CLERK + f"Today the {ship}" for ship in ("first", "second", "third", "old", "new", "last")),
    *(_CLERK * times for times in (1, 2, 3)),
    _CLERK[:60],
    # Turns of a conversation, each with all that came before.
    *("Q: What is tea?\nA: A drink." + "\nQ: And coffee?\nA: Another one." * turns for turns in range(4)),
    *(f"{topic} are made of" for topic in _TOPICS),
    *(f"{topic}: {topic.lower()} and more {topic.lower()}, " * 2 for topic in _TOPICS),
    *("2, 4, 6, 8, 10, 12, 14, 16, 18"[: 3 * length] for length in (1, 2, 3, 5, 7, 9)),
    "def area(width, height):\n    return",
    "SELECT name FROM ships WHERE",
    '{"name": "harbour", "ships": [',
    "Once upon a time",
    "Once upon a time",
    "The",
    "A",
    "Why is the sky blue?",
    "To be or not to be",
    "It was a dark evening in the north, the wind came from the sea, and nobody in the village wanted to go out.",
]


class Run(NamedTuple):
    """What one way to run all prompts gave."""

    tokens: list[list[int]]
    stats: SchedulerStats


def run(*overrides: str) -> Run:
    """All prompts through an engine; afterwards nothing is left of them."""
    base = ["kv_cache.num_blocks=1600", "kv_cache.block_size=4", "scheduler.max_num_seqs=64"]
    with LLM("smollm2-135m", dtype="float32", max_model_len=MAX_MODEL_LEN, overrides=[*base, *overrides]) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
        stats = llm.engine.core.stats()
        assert not llm.engine.core.has_requests()
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_total_blocks
    return Run([output.outputs[0].token_ids for output in outputs], stats)


@pytest.fixture(scope="module")
def baseline(default_model_dir: Path) -> Run:
    """Eight requests at a time, whole prompts, no prefix cache."""
    return run("kv_cache.enable_prefix_caching=false", "scheduler.max_num_seqs=8")


def assert_same(found: Sequence[Sequence[int]], expected: Sequence[Sequence[int]]) -> None:
    differ = [
        f"{prompt[:40]!r}: {got} is not {wanted}"
        for prompt, got, wanted in zip(PROMPTS, found, expected, strict=True)
        if got != wanted
    ]
    assert not differ, "\n".join(differ)


BUDGETS = {
    "budget 7": ["scheduler.max_num_batched_tokens=7", "scheduler.max_num_seqs=4"],
    "budget 64": ["scheduler.max_num_batched_tokens=64"],
    "budget 2048, batch 64": ["scheduler.max_num_batched_tokens=2048", "scheduler.max_num_seqs=64"],
}
BATCHES = {f"batch {size}": [f"scheduler.max_num_seqs={size}"] for size in (1, 8)}
BLOCKS = {
    f"block size {size}": [f"kv_cache.block_size={size}", f"kv_cache.num_blocks={6400 // size}"] for size in (1, 16, 64)
}
CACHES = {
    "prefix cache": ["kv_cache.enable_prefix_caching=true", "scheduler.max_num_seqs=8"],  # late ones find early ones'
    "no prefix cache": ["kv_cache.enable_prefix_caching=false"],
}
SETTINGS = BUDGETS | BATCHES | BLOCKS | CACHES
SMALL_POOL = ["kv_cache.num_blocks=64"]  # 256 tokens, of about 1400 that all requests have together
QUICK, SLOW = ("budget 64", "no prefix cache"), pytest.mark.slow


def test_the_prompts_are_fifty_of_mixed_length_and_some_share_a_beginning(baseline: Run) -> None:
    assert len(PROMPTS) == 50
    assert len({tuple(tokens) for tokens in baseline.tokens}) > 40
    assert baseline.stats.num_preemptions == 0


@pytest.mark.parametrize("engine", ["sync", "overlap"])
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in SETTINGS])
def test_a_setting_changes_no_greedy_token(name: str, engine: str, baseline: Run) -> None:
    found = run(f"engine={engine}", *SETTINGS[name])
    assert_same(found.tokens, baseline.tokens)
    if name in CACHES:
        assert (found.stats.prefix_cache_hits > 0) == (name == "prefix cache")
    assert found.stats.num_preemptions == 0


@pytest.mark.parametrize("engine", [pytest.param("sync", marks=SLOW), "overlap"])
@pytest.mark.parametrize("cache", CACHES)
def test_s17_preemption_changes_no_greedy_token(engine: str, cache: str, baseline: Run) -> None:
    """S17: a pool so small that requests are preempted and computed anew."""
    found = run(f"engine={engine}", *CACHES[cache], "scheduler.max_num_seqs=64", *SMALL_POOL)
    assert_same(found.tokens, baseline.tokens)
    assert found.stats.num_preemptions > 0
