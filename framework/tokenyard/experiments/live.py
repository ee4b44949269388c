"""A workload on a real engine in this process: the same loop, observers and records as in simulation, in real time."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.engine.driver import drive
from tokenyard.errors import ConfigError
from tokenyard.experiments.content import ContentTokens
from tokenyard.experiments.live_prompts import LivePrompts, text_vocabulary
from tokenyard.experiments.prompts import PromptTokens
from tokenyard.experiments.requests import RequestMaker
from tokenyard.experiments.run_clock import RunClock
from tokenyard.experiments.watched_run import WatchedRun, watched_config
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
    from tokenyard.experiments.records import RunRecord
    from tokenyard.interfaces.engine_core import EngineCore
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
        maker = RequestMaker(PromptTokens(0), capacity, has_content=workload.has_content)
        prompts = LivePrompts(tokens, has_content=workload.has_content)
        run = WatchedRun(
            config,
            workload,
            clock,
            lambda arrived: replace(maker.make(arrived), prompt_token_ids=prompts.of(arrived)),
            keeps_steps=keeps_steps,
        )
        if engine.kv_cache_manager is not None:
            run.log.watch(engine.kv_cache_manager)
        witness.open([run.collector, run.log])

        def deliver(outputs: EngineCoreOutputs) -> None:
            prompts.take(outputs)  # first: an end may bring the next turn, which contains this answer
            run.deliver(outputs)

        clock.begin()
        drive(engine.core, clock, deliver, run.arrivals)
        witness.check()
        record = run.record(engine.core.stats().num_preemptions - before)
    finally:
        engine.core.shutdown()
    return replace(record, facts=live_facts(engine))


def live_config(config: EngineConfig, *, has_content: bool) -> EngineConfig:
    """The config as a run needs it. Raises ConfigError for an engine that cannot be watched from here."""
    if config.engine.process == "own":
        raise ConfigError(
            "engine.process=own: a workload is run by the process that watches the engine; leave it out, or start "
            "`tokenyard serve` and name its URL in experiment.target"
        )
    return watched_config(config, has_content=has_content)


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
