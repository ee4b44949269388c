"""Metrics of a run for people, on a screen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import cast

_STATISTICS = ("mean", "p50", "p90", "p99", "max")
_TIMES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "time between tokens",
    "e2e": "end to end",
    "queueing_delay": "queueing delay",
}


def told_run(metrics: Mapping[str, object], facts: Mapping[str, object]) -> str:
    """Lines and a table; everything is in the JSON."""
    lines = [*_origins(facts), _counts(metrics), _throughput(metrics), _usage(metrics)]
    if (attainment := _number(metrics, "attainment")) is not None:
        goodput = _shown(_number(metrics, "goodput"), "requests/s")
        lines.append(f"{100 * attainment:.1f} % of all requests met the SLO, {goodput} of them")
    return "\n".join([*lines, "", *_table(metrics)])


def _origins(facts: Mapping[str, object]) -> list[str]:
    """Where the requests are from, with licence, and what the latency model was calibrated on, with its error."""
    return [f"{group}: {text}" for group in ("workload", "latency") if (text := told_origin(facts, group))]


def told_origin(facts: Mapping[str, object], group: str) -> str:
    """`linear`, or `roofline: datasheet of h100, ...`: what a part is called, and what it says of itself."""
    node = facts.get(group)
    if not isinstance(node, Mapping):
        return ""
    said = node.get("description") or node.get("calibration")
    return f"{node.get('name')}: {said}" if said else str(node.get("name") or "")


def _counts(metrics: Mapping[str, object]) -> str:
    counts = cast("Mapping[str, int]", metrics["requests"])
    others = [f"{counts[name]} {name}" for name in ("rejected", "aborted", "unfinished") if counts.get(name)]
    return ", ".join([f"{counts['finished']} of {counts['total']} requests finished", *others])


def _throughput(metrics: Mapping[str, object]) -> str:
    return (
        f"{_shown(_number(metrics, 'duration'), 's')} of the workload's time, "
        f"{_shown(_number(metrics, 'request_throughput'), 'requests/s')}, "
        f"{_shown(_number(metrics, 'output_throughput'), 'output tokens/s')}"
    )


def _usage(metrics: Mapping[str, object]) -> str:
    saturation = metrics.get("saturation")
    told = cast("Mapping[str, object]", saturation).get("class") if isinstance(saturation, Mapping) else saturation
    parts = [
        f"{metrics.get('num_steps')} steps",
        f"{_shown(_number(metrics, 'batch_size'), 'requests each')}",
        f"{preempted} preemptions" if isinstance(preempted := metrics.get("num_preemptions"), int) else "",
        f"load: {str(told).lower()}" if told else "",
    ]
    return ", ".join(part for part in parts if part)


def _table(metrics: Mapping[str, object]) -> list[str]:
    width = max(map(len, _TIMES.values()))
    rows = [f"{'milliseconds':<{width}}" + "".join(f"{name:>12}" for name in _STATISTICS)]
    for key, name in _TIMES.items():
        values = cast("Mapping[str, float | None]", metrics[key])
        cells = [values.get(statistic) for statistic in _STATISTICS]
        rows.append(f"{name:<{width}}" + "".join(f"{'-' if v is None else f'{1000 * v:.2f}':>12}" for v in cells))
    return rows


def _number(metrics: Mapping[str, object], key: str) -> float | None:
    value = metrics.get(key)
    return float(value) if isinstance(value, int | float) else None


def _shown(value: float | None, unit: str) -> str:
    return f"- {unit}" if value is None else f"{value:.4g} {unit}"
