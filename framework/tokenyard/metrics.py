"""Metrics of an engine, under the names that dashboards know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from tokenyard.engine_outputs import PluginStats, SchedulerStats, ShadowStats


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One number; `alias` is the name that the same metric has in vLLM, or its own name where vLLM has none."""

    name: str
    alias: str
    kind: Literal["counter", "gauge"]
    value: float
    labels: Mapping[str, str] = field(default_factory=dict)  # which plugin and method it is of, if of one


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
    return [
        *(_metric(name, "counter", value) for name, value in counters.items()),
        *(_metric(name, "gauge", value) for name, value in gauges.items()),
        *([] if stats.plugins is None else _plugin_metrics(stats.plugins)),
        *([] if stats.shadow is None else _shadow_metrics(stats.shadow)),
    ]


def _plugin_metrics(plugins: PluginStats) -> Iterator[Metric]:
    yield _own("step_seconds", plugins.step_seconds)
    yield _own("plugin_budget_exceeded", plugins.num_over_budget)
    for one in plugins.times:
        labels = {"kind": one.kind, "plugin": one.plugin, "point": one.point}
        yield _own("plugin_seconds", one.seconds, labels)
        yield _own("plugin_calls", one.num_calls, labels)


def _shadow_metrics(shadow: ShadowStats) -> Iterator[Metric]:
    for one in shadow.points:
        for agrees, count in (("true", one.num_agreed), ("false", one.num_otherwise)):
            yield _own("shadow_decisions", count, {"point": one.point, "agrees": agrees})


def _own(name: str, value: float, labels: Mapping[str, str] = MappingProxyType({})) -> Metric:
    """A counter that vLLM has not."""
    full = f"tokenyard:{name}"
    return Metric(name=full, alias=full, kind="counter", value=value, labels=labels)


def _metric(name: str, kind: Literal["counter", "gauge"], value: float) -> Metric:
    return Metric(name=f"tokenyard:{name}", alias=f"vllm:{name}", kind=kind, value=value)
