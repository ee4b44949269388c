"""Metrics of an engine, under the names that dashboards know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tokenyard.engine_outputs import SchedulerStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number; `alias` is the name that the same metric has in vLLM."""

    name: str
    alias: str
    kind: Literal["counter", "gauge"]
    value: float


def metrics_of(stats: SchedulerStats) -> list[Metric]:
    """Counters since the start, and gauges of now."""
    counters = {
        "prompt_tokens": stats.num_prompt_tokens,
        "generation_tokens": stats.num_generation_tokens,
        "num_preemptions": stats.num_preemptions,
        "prefix_cache_queries": stats.prefix_cache_queries,
        "prefix_cache_hits": stats.prefix_cache_hits,
    }
    gauges = {
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage_perc": stats.kv_cache_usage,
    }
    return [_metric(name, "counter", value) for name, value in counters.items()] + [
        _metric(name, "gauge", value) for name, value in gauges.items()
    ]


def _metric(name: str, kind: Literal["counter", "gauge"], value: float) -> Metric:
    return Metric(name=f"tokenyard:{name}", alias=f"vllm:{name}", kind=kind, value=value)
