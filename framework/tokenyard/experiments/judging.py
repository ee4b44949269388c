"""What came of a run, judged as its config asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.experiments.alone_time import AloneTime
from tokenyard.experiments.metrics import run_metrics
from tokenyard.experiments.slo import parse_slo

if TYPE_CHECKING:
    from tokenyard.config import EngineConfig
    from tokenyard.experiments.records import RunRecord
    from tokenyard.interfaces.latency import LatencyModel


def judged(record: RunRecord, config: EngineConfig, latency: LatencyModel | None) -> dict[str, object]:
    """`run_metrics` of a record, with the config's SLO and limits; slowdown is by its latency model, if it has one."""
    return run_metrics(
        record,
        parse_slo(config.experiment.slo),
        max_num_batched_tokens=config.scheduler.max_num_batched_tokens,
        kv_capacity_tokens=None if config.kv_cache.num_blocks is None else _capacity(config),
        alone=None if latency is None else AloneTime(latency, config.scheduler),
        client_weights=config.experiment.client_weights,
    )


def _capacity(config: EngineConfig) -> int:
    return (config.kv_cache.num_blocks or 0) * config.kv_cache.block_size
