"""Engines that are driven at random while they are traced."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from tokenyard.catalogue import Catalogue
from tokenyard.config import EngineConfig, TraceConfig
from tokenyard.interfaces import PauseMode
from tokenyard.launch.compose import load_engine_config
from tokenyard.plugins import load_catalogue
from tokenyard.request import ServiceLevel
from tokenyard.testing import EngineHarness

EOS, STOP, VOCAB_SIZE = 9, 8, 64
HOST_MEMORY = 64  # bytes: some blocks, at a byte a token

_LATENCY = ("latency=linear", "latency.per_step=0.01", "latency.per_token=0.001", "latency.per_context_token=0")
PREFIXES = ([], [1, 2, 3, 4, 5, 6, 7, 1], [1, 2, 3, 4, 7, 7, 7, 7], [5] * 16)

SMALL: Mapping[str, Mapping[str, object]] = {
    "scheduler": {"max_num_seqs": 3, "max_num_batched_tokens": 12},
    "kv_cache": {"num_blocks": 12, "block_size": 4},
}


@cache
def base_config(*overrides: str) -> EngineConfig:
    config, _ = load_engine_config(["model.max_model_len=40", *_LATENCY, *overrides])
    return config


@st.composite
def sizes(draw: st.DrawFn) -> Mapping[str, Mapping[str, object]]:
    """Small pools and budgets: everything that is scarce runs out often."""
    seqs = draw(st.sampled_from([1, 2, 3, 4]))
    return {
        "scheduler": {
            "max_num_seqs": seqs,
            "max_num_batched_tokens": draw(st.integers(seqs, 16) | st.just(64)),
            "long_prefill_token_threshold": draw(st.sampled_from([0, 0, 3])),
        },
        "kv_cache": {
            "num_blocks": draw(st.integers(4, 14)),
            "block_size": draw(st.sampled_from([1, 2, 4])),
            "enable_prefix_caching": draw(st.sampled_from([True, True, False])),
        },
    }


def with_sizes(config: EngineConfig, sizes: Mapping[str, Mapping[str, object]]) -> EngineConfig:
    """The config with these limits."""
    return dataclasses.replace(
        config,
        scheduler=dataclasses.replace(config.scheduler, **sizes["scheduler"]),  # type: ignore[arg-type]
        kv_cache=dataclasses.replace(config.kv_cache, **sizes["kv_cache"]),  # type: ignore[arg-type]
    )


def traced(config: EngineConfig, path: Path | None, chrome: Path | None = None) -> EngineConfig:
    """The config with trace files."""
    names = {name: None if file is None else str(file) for name, file in (("path", path), ("chrome", chrome))}
    return dataclasses.replace(config, trace=TraceConfig(**names))


def harness(
    config: EngineConfig, windows: Sequence[int | None] = (None,), catalogue: Catalogue | None = None
) -> EngineHarness:
    """An engine without a model; a step takes 10 ms."""
    return EngineHarness(
        config=config,
        catalogue=catalogue or load_catalogue(),
        group_windows=windows,
        vocab_size=VOCAB_SIZE,
        eos_token_id=EOS,
        step_seconds=0.01,
    )


def drive(engine: EngineHarness, seed: int, num_turns: int = 25) -> list[dict[str, int]]:
    """Requests come, run, stop, fail, are aborted, overdue and paused; at the end all are done.

    Returns what was scheduled in each step.
    """
    draw = random.Random(seed)
    scheduled: list[dict[str, int]] = []
    for _ in range(num_turns):
        _turn(engine, draw, scheduled)
    engine.resume()
    for _ in range(4000):
        if not engine.has_requests:
            return scheduled
        if not _step(engine, draw, scheduled):
            moment = engine.core.wake_at()
            assert moment is not None, engine.stats
            engine.clock.wait(until=moment)
    raise AssertionError(f"not done: {engine.stats}")


def _turn(engine: EngineHarness, draw: random.Random, scheduled: list[dict[str, int]]) -> None:
    what = draw.random()
    live = [*engine.running, *engine.waiting]
    if what < 0.45 and len(live) < 12:
        _add(engine, draw)
    elif what < 0.85:
        for _ in range(draw.randrange(1, 4)):
            _step(engine, draw, scheduled)
    elif what < 0.9:
        engine.advance(draw.choice([0.01, 0.1, 1.0]))
    elif what < 0.94 and live:
        engine.finish([draw.choice(live), "nobody"])
    elif what < 0.96:
        engine.pause(draw.choice(list(PauseMode)))
    elif what < 0.98:
        engine.resume()
    else:
        engine.reset_prefix_cache()


def _add(engine: EngineHarness, draw: random.Random) -> None:
    prompt = [*draw.choice(PREFIXES), *(draw.randrange(1, 4) for _ in range(draw.randrange(1, 9)))]
    if len(prompt) >= 40 or len(prompt) > engine.kv_cache_manager.capacity_tokens():
        return
    engine.add(
        prompt,
        priority=draw.randrange(-1, 2),
        client=draw.choice([None, "a", "b"]),
        session=draw.choice([None, "s", "t"]),
        deadline=engine.clock.now() + draw.choice([0.1, 1.0]) if draw.random() < 0.1 else None,
        service_level=ServiceLevel(ttft=draw.choice([0.05, 1.0])) if draw.random() < 0.3 else None,
        cache_salt=draw.choice([None, None, None, "tenant"]),
        prompt_logprobs=draw.choice([None, None, None, 1]),
        max_tokens=draw.randrange(1, 16),
        stop_token_ids=[STOP],
    )


def _step(engine: EngineHarness, draw: random.Random, scheduled: list[dict[str, int]]) -> bool:
    """Sometimes a row samples nothing, several tokens or a stop, or fails."""
    tokens: dict[str, list[int]] = {}
    errors: dict[str, str] = {}
    for name in engine.running:
        chance = draw.random()
        if chance < 0.08:
            tokens[name] = draw.choice([[], [1, 2], [STOP], [3, EOS]])
        elif chance < 0.09:
            errors[name] = "its logits are not finite"
    did_run = engine.step(tokens, errors=errors).did_run
    scheduled.append(engine.scheduled)
    return did_run


def lines_of(path: Path) -> list[dict[str, Any]]:
    """The lines of a trace as plain data."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_lines(path: Path, lines: Sequence[Mapping[str, Any]]) -> None:
    """Make a trace of them."""
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
