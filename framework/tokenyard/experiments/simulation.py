"""A workload on the real engine loop, scheduler, policy and K/V manager, in virtual time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.clock import VirtualClock
from tokenyard.engine.driver import drive
from tokenyard.errors import EngineDeadError, UserError
from tokenyard.executor.simulated import OUTPUT_TOKEN
from tokenyard.experiments.prompts import PromptTokens
from tokenyard.experiments.requests import RequestMaker
from tokenyard.experiments.watched_run import WatchedRun, watched_config
from tokenyard.experiments.witness import Witness
from tokenyard.experiments.workloads import make_workload
from tokenyard.launch.simulated import build_simulated

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.experiments.records import RunRecord


def run_simulated(config: EngineConfig, catalogue: Catalogue, *, keeps_steps: bool = False) -> RunRecord:
    """Run the config's workload to its end. Raises ConfigError, PluginError, and ValidationError for a bad request."""
    workload = make_workload(config, catalogue)
    config = watched_config(config, has_content=workload.has_content)
    clock, witness = VirtualClock(), Witness()
    engine = build_simulated(config, catalogue, clock=clock, observers=[witness])
    maker = RequestMaker(PromptTokens(OUTPUT_TOKEN), engine.capacity_tokens, has_content=workload.has_content)
    run = WatchedRun(config, workload, clock, maker.make, keeps_steps=keeps_steps)
    run.log.watch(engine.parts.kv_cache_manager)
    witness.open([run.collector, run.log])
    core = engine.parts.core
    try:
        drive(core, clock, run.deliver, run.arrivals)
        witness.check()
        return run.record(engine.parts.scheduler.stats().num_preemptions)
    except EngineDeadError as error:
        if isinstance(error.__cause__, UserError):  # a latency model's fault: no engine has to be started anew
            raise error.__cause__ from None
        raise
    finally:
        core.shutdown()
