"""Calibration: a short load on a real engine, and the latency model that its steps come to."""

from __future__ import annotations

import itertools
import os
import platform
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from tokenyard import __version__
from tokenyard.descriptors import ExecutorDescriptor
from tokenyard.engine.driver import drive
from tokenyard.errors import ConfigError
from tokenyard.executor.simulated import load_of
from tokenyard.experiments.calibration_load import ClosedLoop, Lengths, Limits, Phase, edges, mixed_phase
from tokenyard.experiments.content import ContentTokens
from tokenyard.experiments.fit import MeasuredStep, errors_of, fit_steps
from tokenyard.experiments.live import capacity_of, live_config, warm_up
from tokenyard.experiments.live_prompts import text_vocabulary
from tokenyard.experiments.run_clock import RunClock
from tokenyard.experiments.witness import Witness
from tokenyard.interfaces.observer import Observer
from tokenyard.latency_fit import FORMAT, VERSION, FitFile, settings_of
from tokenyard.launch.assemble import build_engine
from tokenyard.launch.chosen import chosen
from tokenyard.request import EngineCoreRequest
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.launch.assemble import RunningEngine
    from tokenyard.scheduler_output import SchedulerOutput

_HELD_OUT = 4  # every so many-th phase is not fitted, and checks the fit
_PHASE_SHARE = 1 / 8  # of the time, that one phase may take
_SMALLEST = 1 / 8  # of that, for the smallest ones
_FIRST = Phase(4, [Lengths(32, 16)] * 8)  # tells about how fast the engine is
_LEAST_TOKENS = 64  # of a phase


class StepTimes(Observer):
    """Keeps what each step computed and how long it took."""

    def __init__(self) -> None:
        self.steps: list[MeasuredStep] = []
        self._last_end: float | None = None

    def rest(self) -> None:
        """What comes next does not follow at once."""
        self._last_end = None

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        begin = output.scheduled_at if self._last_end is None else self._last_end
        self._last_end = now
        if now > begin and output.total_num_scheduled_tokens:
            self.steps.append(MeasuredStep(load_of(output), now - begin))


def calibrate(
    config: EngineConfig,
    catalogue: Catalogue,
    *,
    seconds: float,
    on_progress: Callable[[str], None] | None = None,
) -> FitFile:
    """Load the config's model, run a designed load for about so long, and fit its steps.

    Raises ConfigError for a config without a model, what `build_engine` raises, and UserError where the time was too
    short for any step.
    """
    if chosen(catalogue, "executor", config.executor.name, ExecutorDescriptor).is_simulated:
        raise ConfigError(
            f"executor={config.executor.name} runs no model; calibrate needs one that does: executor=inproc"
        )
    config = live_config(config, has_content=True)
    clock, witness = RunClock(), Witness()
    engine = build_engine(config, catalogue, clock=clock, observers=[witness], on_progress=on_progress)
    try:
        tokens = ContentTokens(text_vocabulary(engine), config.seed)
        warm_up(engine.core, clock, tokens, capacity_of(engine))
        clock.begin()
        load = _Calibration(config, engine, tokens)
        witness.open([load.times])
        fitted, checked = load.run(seconds)
        witness.check()
    finally:
        engine.core.shutdown()
    return _fit_file(config, engine, fitted, checked)


def _fit_file(
    config: EngineConfig, engine: RunningEngine, fitted: Sequence[MeasuredStep], checked: Sequence[MeasuredStep]
) -> FitFile:
    fit = fit_steps(fitted)
    return FitFile(
        format=FORMAT,
        version=VERSION,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=_machine(engine),
        settings=settings_of(config),
        most_tokens=max(step.load.num_tokens for step in fitted),
        fit=fit,
        in_sample=errors_of(fit, fitted),
        held_out=errors_of(fit, checked),
    )


class _Calibration:
    """Phases on an engine, one after the other."""

    def __init__(self, config: EngineConfig, engine: RunningEngine, tokens: ContentTokens) -> None:
        self.times = StepTimes()
        self._engine = engine
        self._tokens = tokens
        self._rng = np.random.default_rng([config.seed, 8])
        self._numbers = itertools.count()
        self._limits = Limits(
            max_num_seqs=config.scheduler.max_num_seqs,
            max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
            capacity=capacity_of(engine),
            kv_tokens=engine.num_blocks * config.kv_cache.block_size,
        )

    def run(self, seconds: float) -> tuple[list[MeasuredStep], list[MeasuredStep]]:
        """Steps to fit, and steps of other phases to check the fit with."""
        end = time.monotonic() + seconds
        fitted = self._measured(_fitting(_FIRST, self._limits))
        checked: list[MeasuredStep] = []
        for phase in edges(self._limits, self._affordable(seconds * _PHASE_SHARE)):
            fitted += self._measured(phase)
        for number in itertools.count():
            share = _PHASE_SHARE * _SMALLEST ** self._rng.random()
            steps = self._measured(mixed_phase(self._limits, self._affordable(seconds * share), self._rng))
            (checked if number % _HELD_OUT == 1 else fitted).extend(steps)
            if number >= _HELD_OUT and time.monotonic() > end:
                break
        return fitted, checked

    def _affordable(self, seconds: float) -> int:
        """Tokens that the engine computes in so long, as far as is known."""
        num_tokens = sum(step.load.num_tokens for step in self.times.steps)
        busy = sum(step.seconds for step in self.times.steps)
        return max(_LEAST_TOKENS, int(num_tokens / busy * seconds)) if busy else _LEAST_TOKENS

    def _measured(self, phase: Phase) -> list[MeasuredStep]:
        loop = ClosedLoop(phase, self._request)
        first = len(self.times.steps)
        self.times.rest()

        def deliver(outputs: EngineCoreOutputs) -> None:
            loop.ended(len(outputs.finished))

        drive(self._engine.core, self._engine.clock, deliver, loop)
        return self.times.steps[first:]

    def _request(self, lengths: Lengths) -> EngineCoreRequest:
        number = next(self._numbers)
        return EngineCoreRequest(
            request_id=str(number),
            prompt_token_ids=self._tokens.unknown(number, lengths.prompt),
            params=SamplingParams(temperature=0.0, max_tokens=lengths.output, ignore_eos=True),
            arrival_time=self._engine.clock.now(),
            true_output_tokens=lengths.output,
        )


def _fitting(phase: Phase, limits: Limits) -> Phase:
    """As much of a phase as the engine takes."""
    requests = [Lengths(1, 1) if sum(one) > min(limits.capacity, limits.kv_tokens) else one for one in phase.requests]
    return Phase(min(phase.at_once, limits.max_num_seqs), requests)


def _machine(engine: RunningEngine) -> dict[str, str | int]:
    report = engine.report
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 1,
        "device": report.device,
        "dtype": report.dtype,
        "decoder": report.decoder,
        "attention": report.attention_backend,
        "system": platform.system(),
        "python": platform.python_version(),
        "tokenyard": __version__,
    }


def _cpu() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return next(iter(names), platform.processor() or platform.machine())
