"""WatchedRun: a workload on its way through an engine of ours, simulated or live, and what is written down of it."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from tokenyard.experiments.arrivals import WorkloadArrivals
from tokenyard.experiments.collector import Collector
from tokenyard.experiments.records import RunRecord
from tokenyard.experiments.step_log import StepLog

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenyard.clock import Clock
    from tokenyard.config import EngineConfig
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.experiments.arrivals import Arrived
    from tokenyard.interfaces.workload import Workload
    from tokenyard.request import EngineCoreRequest


class WatchedRun:
    """`arrivals` and `deliver` are for `drive`, `collector` and `log` observers; `make` turns requests into ours."""

    def __init__(
        self,
        config: EngineConfig,
        workload: Workload,
        clock: Clock,
        make: Callable[[Arrived], EngineCoreRequest],
        *,
        keeps_steps: bool,
    ) -> None:
        self._clock = clock
        self._make = make
        self.collector = Collector(2 * config.scheduler.max_num_seqs)
        self.arrivals = WorkloadArrivals(workload, config.workload, self._sent)
        self.log = StepLog(
            config.scheduler.max_num_batched_tokens, lambda: self.arrivals.num_open, keeps_steps=keeps_steps
        )

    def deliver(self, outputs: EngineCoreOutputs) -> None:
        """Some requests end without a step, of which no observer hears."""
        if not outputs.finished:
            return
        now = self._clock.now()
        self.collector.ended(outputs.finished, now)
        for end in outputs.finished:
            self.arrivals.ended(int(end.request_id), now)

    def record(self, num_preemptions: int) -> RunRecord:
        """What came of it; nothing may come after that."""
        return RunRecord(
            requests=self.collector.table(),
            gaps=self.collector.gaps.gaps(),
            totals=self.log.totals(num_preemptions),
            steps=self.log.steps(),
        )

    def _sent(self, arrived: Arrived) -> EngineCoreRequest:
        request = self._make(arrived)
        self.collector.arrived(arrived)
        return request


def watched_config(config: EngineConfig, *, has_content: bool) -> EngineConfig:
    """Without what such a run has no use for: a prefix cache that could find nothing, and stats that nobody reads."""
    if not has_content:
        config = replace(config, kv_cache=replace(config.kv_cache, enable_prefix_caching=False))
    return replace(config, engine=replace(config.engine, log_stats=False))
