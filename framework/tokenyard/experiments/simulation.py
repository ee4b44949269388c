"""A workload on the real engine loop, scheduler, policy and K/V manager, in virtual time."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokenyard.clock import VirtualClock
from tokenyard.engine.driver import drive
from tokenyard.errors import EngineDeadError, UserError
from tokenyard.executor.simulated import OUTPUT_TOKEN
from tokenyard.experiments.arrivals import WorkloadArrivals
from tokenyard.experiments.collector import Collector
from tokenyard.experiments.prompts import PromptTokens
from tokenyard.experiments.records import RunRecord
from tokenyard.experiments.requests import RequestMaker
from tokenyard.experiments.step_log import StepLog
from tokenyard.experiments.witness import Witness
from tokenyard.experiments.workloads import make_workload
from tokenyard.launch.simulated import build_simulated

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.experiments.arrivals import Arrived
    from tokenyard.request import EngineCoreRequest


@dataclass(slots=True)
class _Ends:
    """Who is told of ends; a workload's arrivals are made after the engine that they go to."""

    tell: Callable[[int, float], None]


def run_simulated(config: EngineConfig, catalogue: Catalogue, *, keeps_steps: bool = False) -> RunRecord:
    """Run the config's workload to its end. Raises ConfigError, PluginError, and ValidationError for a bad request."""
    workload = make_workload(config, catalogue)
    if not workload.has_content:  # nothing could be found, and hashing costs time
        config = replace(config, kv_cache=replace(config.kv_cache, enable_prefix_caching=False))
    # Nobody reads a step's stats here.
    config = replace(config, engine=replace(config.engine, log_stats=False))
    clock = VirtualClock()
    ends = _Ends(lambda number, time: None)
    collector = Collector(2 * config.scheduler.max_num_seqs, lambda number, time: ends.tell(number, time))
    log = StepLog(config.scheduler.max_num_batched_tokens, lambda: arrivals.num_open, keeps_steps=keeps_steps)
    witness = Witness([collector, log])
    engine = build_simulated(config, catalogue, clock=clock, observers=[witness])
    log.watch(engine.parts.kv_cache_manager)
    maker = RequestMaker(PromptTokens(OUTPUT_TOKEN), engine.capacity_tokens, has_content=workload.has_content)

    def make(arrived: Arrived) -> EngineCoreRequest:
        request = maker.make(arrived)
        collector.arrived(arrived)
        return request

    arrivals = WorkloadArrivals(workload, config.workload, make)
    ends.tell = arrivals.ended

    def deliver(outputs: EngineCoreOutputs) -> None:
        if outputs.finished:  # some end without a step, of which no observer hears
            collector.ended(outputs.finished, clock.now())

    core = engine.parts.core
    try:
        drive(core, clock, deliver, arrivals)
        witness.check()
        num_preemptions = engine.parts.scheduler.stats().num_preemptions
    except EngineDeadError as error:
        if isinstance(error.__cause__, UserError):  # a latency model's fault: no engine has to be started anew
            raise error.__cause__ from None
        raise
    finally:
        core.shutdown()
    return RunRecord(
        requests=collector.table(), gaps=collector.gaps.gaps(), totals=log.totals(num_preemptions), steps=log.steps()
    )
