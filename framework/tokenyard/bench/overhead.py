"""`tokenyard bench overhead`: what each part of a real engine's step costs."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.bench.instrument import Instrument
from tokenyard.bench.report import machine
from tokenyard.bench.timers import seconds_per_call
from tokenyard.clock import MonotonicClock
from tokenyard.engine.client import InprocClient
from tokenyard.engine.input_processor import TokenizedPrompt
from tokenyard.engine.output_processor import OutputProcessor, Update
from tokenyard.errors import CapacityError, UserError
from tokenyard.front_end import FrontEnd
from tokenyard.launch.assemble import build_engine
from tokenyard.launch.timing import distribution_of
from tokenyard.plugin_times import PluginPoint, PluginTimes
from tokenyard.sampling_params import SamplingParams
from tokenyard.stopwatch import Stopwatch, Tally

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from tokenyard.bench.settings import OverheadBench
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.launch.assemble import RunningEngine

STRIDE = 7919
NUM_SETTLING_STEPS = 3  # untimed, with the whole batch decoding: under `overlap` the next step is scheduled already
NUM_SPARE_TOKENS = 16
_NO_PLUGIN = {"plugin": None, "distribution": None}


def default_overrides(settings: OverheadBench, given: Collection[str]) -> list[str]:
    """All requests decode together unless the user says otherwise."""
    key = "scheduler.max_num_seqs"
    return [] if key in given else [f"{key}={max(64, settings.num_requests)}"]


@dataclass(slots=True)
class _Window:
    """The timed steps: opened when the whole batch decodes, closed `num_steps` later."""

    stopwatch: Stopwatch[PluginPoint]
    num_requests: int
    num_steps: int
    num_full: int = 0  # steps so far in which every request got a token
    began: float = 0.0
    wall: float | None = None
    tallies: dict[PluginPoint, Tally] = field(default_factory=dict)

    def step(self, update: Update) -> bool:
        """Take note of a step; True when the last timed one is done."""
        self.num_full = self.num_full + 1 if len(update.touched) == self.num_requests else 0
        if self.num_full == NUM_SETTLING_STEPS:
            self.stopwatch.clear()
            self.began = perf_counter()
        if self.num_full == NUM_SETTLING_STEPS + self.num_steps:
            self.wall = perf_counter() - self.began
            self.tallies = self.stopwatch.tallies()
        return self.wall is not None


def run_overhead_bench(settings: OverheadBench, config: EngineConfig, catalogue: Catalogue) -> dict[str, object]:
    """Start the engine, decode, and stop it. Raises UserError when the model or the cache is too small for it."""
    if settings.num_requests > config.scheduler.max_num_seqs:
        raise _too_many(settings, f"scheduler.max_num_seqs={config.scheduler.max_num_seqs}")
    if config.engine.process == "own":
        raise UserError("the parts of an engine are timed in this process; leave out engine.process=own")
    clock = MonotonicClock()
    times = PluginTimes(clock, is_detailed=True)
    instrument = Instrument(times.stopwatch, _names(config))
    around = machine()
    engine = build_engine(config, catalogue, clock=clock, decorate=instrument.decorate, plugin_times=times)
    try:
        instrument.time_calls(engine.core, "engine", ("step",))
        window = _Window(times.stopwatch, settings.num_requests, settings.num_steps)
        _decode(settings, config, engine, instrument, window)
    finally:
        engine.core.shutdown()
    costs = _costs(window, lambda kind, plugin: distribution_of(catalogue, kind, plugin))
    return {**_facts(settings, config, engine), **costs, **around}


def _decode(
    settings: OverheadBench, config: EngineConfig, engine: RunningEngine, instrument: Instrument, window: _Window
) -> None:
    front = FrontEnd(config, engine)
    outputs = OutputProcessor(front.tokenizer)
    instrument.time_calls(outputs, "front_end", ("process",))
    client = InprocClient(engine=engine.core, clock=engine.clock, inputs=front.inputs, outputs=outputs)

    def on_update(request_ids: Sequence[str], update: Update) -> None:
        if window.step(update):
            client.abort(request_ids)

    num_requests = settings.num_requests
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=_max_tokens(settings, config, engine))
    client.complete(_prompts(settings, engine), [params] * num_requests, [0] * num_requests, on_update)
    if window.wall is None:
        raise _too_many(settings, f"kv_cache.num_blocks={engine.num_blocks}")


def _too_many(settings: OverheadBench, limit: str) -> CapacityError:
    return CapacityError(
        f"{settings.num_requests} requests cannot decode together for {settings.num_steps} steps with {limit}; raise "
        "it, or lower bench.num_requests or bench.num_steps"
    )


def _prompts(settings: OverheadBench, engine: RunningEngine) -> list[TokenizedPrompt]:
    positions = np.arange(settings.prompt_len)
    return [
        TokenizedPrompt(None, ((positions + number * STRIDE) % engine.report.vocab_size).tolist())
        for number in range(settings.num_requests)
    ]


def _max_tokens(settings: OverheadBench, config: EngineConfig, engine: RunningEngine) -> int:
    """Enough for the first request to go on until the last one has been timed."""
    chunk = config.scheduler.long_prefill_token_threshold or config.scheduler.max_num_batched_tokens
    num_prefill_steps = settings.num_requests * -(-settings.prompt_len // chunk)
    num_tokens = num_prefill_steps + NUM_SETTLING_STEPS + settings.num_steps + NUM_SPARE_TOKENS
    if settings.prompt_len + num_tokens > engine.max_model_len:
        raise CapacityError(
            f"requests of this benchmark reach {settings.prompt_len + num_tokens} tokens and the model takes "
            f"{engine.max_model_len}; lower bench.prompt_len, bench.num_steps or bench.num_requests"
        )
    return num_tokens


def _costs(window: _Window, owner: Callable[[str, str], str | None]) -> dict[str, object]:
    wall, num_steps = window.wall or 0.0, window.num_steps
    rows = [_row(point, tally, wall, num_steps, owner) for point, tally in window.tallies.items() if tally.num_calls]
    rest = wall - sum(tally.self_seconds for tally in window.tallies.values())
    num_calls = sum(tally.num_calls for tally in window.tallies.values())
    executor = sum(tally.self_seconds for point, tally in window.tallies.items() if point.kind == "executor")
    timer = seconds_per_call()
    return {
        "wall_us": _us(wall / num_steps),
        "overhead_us": _us((wall - executor) / num_steps),  # outside of the executor's calls
        "parts": [*sorted(rows, key=_by_name), {**_NO_PLUGIN, "part": "rest", **_cost(Tally(rest), wall, num_steps)}],
        "timer_us": round(timer * 1e6, 3),
        "timers_us": _us(timer * num_calls / num_steps),  # a step; contained in the parts and the rest
    }


def _by_name(row: dict[str, object]) -> tuple[str, str]:
    return str(row["part"]), str(row["plugin"])


def _row(
    point: PluginPoint, tally: Tally, wall: float, num_steps: int, owner: Callable[[str, str], str | None]
) -> dict[str, object]:
    return {
        "part": f"{point.kind}.{point.point}",
        "plugin": point.plugin or None,
        "distribution": owner(point.kind, point.plugin),
        **_cost(tally, wall, num_steps),
    }


def _cost(tally: Tally, wall: float, num_steps: int) -> dict[str, object]:
    """Self time: what a call spends in other timed calls is theirs."""
    return {
        "self_us": _us(tally.self_seconds / num_steps),
        "share": round(tally.self_seconds / wall, 4) if wall else 0.0,
        "calls": round(tally.num_calls / num_steps, 2),
    }


def _names(config: EngineConfig) -> dict[str, str]:
    """Of the mechanism's parts: plugins are named where they are made."""
    return {"scheduler": config.scheduler.name, "executor": config.executor.name, "engine": config.engine.name}


def _facts(settings: OverheadBench, config: EngineConfig, engine: RunningEngine) -> dict[str, object]:
    policy = config.scheduler.policy
    return {
        "benchmark": "overhead",
        "model": engine.files.name,
        "num_requests": settings.num_requests,
        "num_steps": settings.num_steps,
        "prompt_len": settings.prompt_len,
        "engine": config.engine.name,
        "scheduler": config.scheduler.name,
        "policy": None if policy is None else policy.name,
        "kv_cache": config.kv_cache.name,
        "executor": config.executor.name,
        "attention": engine.report.attention_backend,
        "attention_description": engine.report.attention_description,
        "device": engine.report.device,
        "dtype": engine.report.dtype,
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 1)
