"""A workload on a real engine in this process: the same loop, observers and records as in simulation, in real time."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.engine.driver import drive
from tokenyard.errors import ConfigError
from tokenyard.experiments.arrivals import WorkloadArrivals
from tokenyard.experiments.collector import Collector
from tokenyard.experiments.content import ContentTokens
from tokenyard.experiments.live_prompts import LivePrompts, text_vocabulary
from tokenyard.experiments.prompts import PromptTokens
from tokenyard.experiments.records import RunRecord
from tokenyard.experiments.requests import RequestMaker
from tokenyard.experiments.run_clock import RunClock
from tokenyard.experiments.step_log import StepLog
from tokenyard.experiments.witness import Witness
from tokenyard.experiments.workloads import make_workload
from tokenyard.launch.assemble import build_engine
from tokenyard.request import EngineCoreRequest
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenyard.arrays import IntArray
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.experiments.arrivals import Arrived
    from tokenyard.interfaces.engine_core import EngineCore
    from tokenyard.interfaces.workload import Workload
    from tokenyard.launch.assemble import RunningEngine

logger = logging.getLogger(__name__)

_WARM_UP = 3  # requests, one after the other
_WARM_UP_PROMPT, _WARM_UP_OUTPUT = 64, 8  # tokens
WARM_UP_CLIENT = "tokenyard-warm-up"  # so that no policy counts them for a client of the workload


def run_live(
    config: EngineConfig,
    catalogue: Catalogue,
    *,
    keeps_steps: bool = False,
    on_progress: Callable[[str], None] | None = None,
) -> RunRecord:
    """Load the config's model, warm up, and run its workload to its end in real time.

    Every request generates exactly the tokens that the workload says, whatever the model would rather. Raises what
    `build_engine` and `make_workload` raise, and ValidationError for a request that cannot be served whole.
    """
    workload = make_workload(config, catalogue)
    config = live_config(config, has_content=workload.has_content)
    clock, witness = RunClock(), Witness()
    engine = build_engine(config, catalogue, clock=clock, observers=[witness], on_progress=on_progress)
    try:
        tokens = ContentTokens(text_vocabulary(engine), config.seed)
        capacity = capacity_of(engine)
        warm_up(engine.core, clock, tokens, capacity)
        before = engine.core.stats().num_preemptions
        run = _LiveRun(config, workload, engine, tokens, capacity, keeps_steps=keeps_steps)
        witness.open([run.collector, run.log])
        clock.begin()
        drive(engine.core, clock, run.deliver, run.arrivals)
        witness.check()
        record = run.record(engine.core.stats().num_preemptions - before)
    finally:
        engine.core.shutdown()
    return replace(record, facts=live_facts(engine))


class _LiveRun:
    """A workload on its way through an engine."""

    def __init__(
        self,
        config: EngineConfig,
        workload: Workload,
        engine: RunningEngine,
        tokens: ContentTokens,
        capacity: int,
        *,
        keeps_steps: bool,
    ) -> None:
        self._clock = engine.clock
        self._maker = RequestMaker(PromptTokens(0), capacity, has_content=workload.has_content)
        self._prompts = LivePrompts(tokens, has_content=workload.has_content)
        self.collector = Collector(2 * config.scheduler.max_num_seqs, self._ended)
        self.log = StepLog(
            config.scheduler.max_num_batched_tokens, lambda: self.arrivals.num_open, keeps_steps=keeps_steps
        )
        if engine.kv_cache_manager is not None:
            self.log.watch(engine.kv_cache_manager)
        self.arrivals = WorkloadArrivals(workload, config.workload, self._make)

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        self._prompts.take(outputs)
        if outputs.finished:
            self.collector.ended(outputs.finished, self._clock.now())

    def record(self, num_preemptions: int) -> RunRecord:
        return RunRecord(
            requests=self.collector.table(),
            gaps=self.collector.gaps.gaps(),
            totals=self.log.totals(num_preemptions),
            steps=self.log.steps(),
        )

    def _make(self, arrived: Arrived) -> EngineCoreRequest:
        request = replace(self._maker.make(arrived), prompt_token_ids=self._prompts.of(arrived))
        self.collector.arrived(arrived)
        return request

    def _ended(self, number: int, end: float) -> None:
        self.arrivals.ended(number, end)


def live_config(config: EngineConfig, *, has_content: bool) -> EngineConfig:
    """The config as a run needs it. Raises ConfigError for an engine that cannot be watched from here."""
    if config.engine.process == "own":
        raise ConfigError(
            "engine.process=own: a workload is run by the process that watches the engine; leave it out, or start "
            "`tokenyard serve` and name its URL in experiment.target"
        )
    if not has_content:  # nothing could be found, and hashing costs time
        config = replace(config, kv_cache=replace(config.kv_cache, enable_prefix_caching=False))
    # Nobody reads a step's stats here.
    return replace(config, engine=replace(config.engine, log_stats=False))


def capacity_of(engine: RunningEngine) -> int:
    """Prompt and output tokens that one request may have at most."""
    if engine.kv_cache_manager is None:
        return engine.max_model_len
    return min(engine.max_model_len, engine.kv_cache_manager.capacity_tokens() + 1)


def live_facts(engine: RunningEngine) -> dict[str, object]:
    """What an engine turned out to be once its model was loaded."""
    report = engine.report
    return {
        "model": engine.files.name,
        "revision": engine.files.commit,
        "device": report.device,
        "dtype": report.dtype,
        "decoder": report.decoder,
        "attention_backend": report.attention_backend,
        "num_blocks": engine.num_blocks,
        "max_model_len": engine.max_model_len,
    }


def warm_up(core: EngineCore, clock: RunClock, tokens: ContentTokens, capacity: int) -> None:
    """A few requests before the clock starts, so that threads, kernels and memory are there when the workload comes."""
    prompt = max(1, min(_WARM_UP_PROMPT, capacity - _WARM_UP_OUTPUT))
    output = max(1, min(_WARM_UP_OUTPUT, capacity - prompt))
    for number in range(_WARM_UP):
        core.add_request(_warm_up_request(number, tokens.unknown(-1 - number, prompt), output, clock.now()))
        drive(core, clock, lambda outputs: None)
    core.reset_prefix_cache()


def _warm_up_request(number: int, prompt: IntArray, num_output_tokens: int, now: float) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=f"warm-up-{number}",
        prompt_token_ids=np.ascontiguousarray(prompt),
        params=SamplingParams(temperature=0.0, max_tokens=num_output_tokens, ignore_eos=True),
        arrival_time=now,
        client_id=WARM_UP_CLIENT,
        skip_prefix_cache=True,
        true_output_tokens=num_output_tokens,
    )
