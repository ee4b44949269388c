"""Measures: the figures of a run that tables and comparisons show, and how they are written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum


class Better(Enum):
    """Which way is good."""

    LOWER = "lower is better"
    HIGHER = "higher is better"
    NEITHER = ""


@dataclass(frozen=True, slots=True)
class Measure:
    """A figure of a run: where it stands in its metrics and how it is told."""

    name: str  # of a column
    path: tuple[str, ...]
    label: str
    unit: str  # of what is shown; "" = none
    better: Better
    scale: float = 1.0  # from what is stored to what is shown
    is_told_at_zero: bool = True  # whether it has a column where all runs have 0

    def of(self, metrics: Mapping[str, object]) -> float | None:
        """In the unit that is stored; None where the run does not know."""
        node: object = metrics
        for name in self.path:
            if not isinstance(node, Mapping):
                return None
            node = node.get(name)
        return float(node) if isinstance(node, int | float) and not isinstance(node, bool) else None

    @property
    def title(self) -> str:
        return f"{self.label} ({self.unit})" if self.unit else self.label


_PER_TOKEN = ("tpot", "itl", "normalised_latency")  # times so short that people tell them in milliseconds


def _time(metric: str, statistic: str, label: str) -> Measure:
    unit, scale = ("ms", 1e3) if metric in _PER_TOKEN else ("s", 1.0)
    return Measure(f"{metric}_{statistic}_{unit}", (metric, statistic), label, unit, Better.LOWER, scale)


TTFT = _time("ttft", "mean", "Mean TTFT")
TTFT_P99 = _time("ttft", "p99", "P99 TTFT")
TPOT = _time("tpot", "mean", "Mean TPOT")
TPOT_P99 = _time("tpot", "p99", "P99 TPOT")
THROUGHPUT = Measure("output_throughput", ("output_throughput",), "Output throughput", "tokens/s", Better.HIGHER)
GOODPUT = Measure("goodput", ("goodput",), "Goodput", "good requests/s", Better.HIGHER)
ATTAINMENT = Measure("attainment_percent", ("attainment",), "SLO attainment", "%", Better.HIGHER, 100.0)

MEASURES = (
    TTFT,
    TTFT_P99,
    TPOT,
    TPOT_P99,
    _time("itl", "p99", "P99 ITL"),
    _time("itl", "max", "Longest ITL"),
    _time("e2e", "mean", "Mean E2E"),
    _time("e2e", "p99", "P99 E2E"),
    _time("normalised_latency", "mean", "Mean normalised latency"),
    _time("queueing_delay", "p99", "P99 queueing delay"),
    Measure("slowdown_mean", ("slowdown", "mean"), "Mean slowdown", "", Better.LOWER),
    Measure("request_throughput", ("request_throughput",), "Request throughput", "requests/s", Better.HIGHER),
    THROUGHPUT,
    GOODPUT,
    ATTAINMENT,
    Measure("token_goodput", ("token_goodput",), "Token goodput", "tokens/s", Better.HIGHER),
    Measure("num_preemptions", ("num_preemptions",), "Preemptions", "", Better.LOWER, is_told_at_zero=False),
    Measure("jain", ("fairness", "jain_service"), "Jain index of service", "", Better.HIGHER),
    Measure(
        "max_service_difference",
        ("fairness", "max_service_difference"),
        "Largest service difference",
        "weighted tokens",
        Better.LOWER,
    ),
    Measure("hit_rate_percent", ("hit_rate",), "Prefix hit rate", "%", Better.HIGHER, 100.0, is_told_at_zero=False),
    Measure("kv_usage_percent", ("kv_usage", "mean"), "Mean KV usage", "%", Better.NEITHER, 100.0),
)
"""In the order of the tables; one that no run knows is left out of them."""

HEADLINES = (TTFT, TTFT_P99, TPOT, TPOT_P99, THROUGHPUT, GOODPUT, ATTAINMENT)
"""What people ask for first."""
