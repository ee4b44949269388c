"""Every metric that the server tells: its names, its kind, and where its numbers come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, TypeAlias, TypeVar

if TYPE_CHECKING:
    from tokenyard.server.histogram import Histogram
    from tokenyard.server.metrics import Scrape

Labels: TypeAlias = "Mapping[str, str]"
Numbers: TypeAlias = "Callable[[Scrape], Sequence[tuple[Labels, float]]]"

LabelsT = TypeVar("LabelsT", bound="tuple[str, ...]")

_BARE: Labels = {}
_PLUGIN_LABELS = ("kind", "plugin", "point")
_SHADOW_LABELS = ("point", "agrees")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One metric. It stands under `tokenyard:NAME` and, with an alias, under `vllm:ALIAS` too."""

    name: str  # without `_total`, which counters get
    help: str
    labels: tuple[str, ...] = ()  # besides model_name and engine
    aliases: tuple[str, ...] = ()  # of vLLM
    of_engine: bool = False  # told by the engine: not there with engine.log_stats=false

    @property
    def names(self) -> tuple[str, ...]:
        """All that it stands under, our own first."""
        return (f"tokenyard:{self.name}", *(f"vllm:{alias}" for alias in self.aliases))


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberFamily(Family):
    """A number for each set of labels."""

    kind: Literal["counter", "gauge"]
    rows: Numbers
    alias_rows: Numbers | None = None  # where the aliases have other labels; None = the same


@dataclass(frozen=True, slots=True, kw_only=True)
class HistogramFamily(Family):
    """Counts by upper bound."""

    read: Callable[[Scrape], Histogram]


def _by(label: str, read: Callable[[Scrape], Mapping[str, int]]) -> Numbers:
    return lambda scrape: [({label: key}, value) for key, value in sorted(read(scrape).items())]


def _labelled(names: tuple[str, ...], read: Callable[[Scrape], Mapping[LabelsT, float]]) -> Numbers:
    return lambda scrape: [
        (dict(zip(names, labels, strict=True)), value) for labels, value in sorted(read(scrape).items())
    ]


def _waiting(scrape: Scrape) -> Mapping[str, int]:
    return scrape.gauges.waiting_by_reason


def _waiting_coarse(scrape: Scrape) -> Mapping[str, int]:
    """vLLM knows two reasons."""
    deferred = scrape.gauges.num_deferred
    return {"capacity": scrape.gauges.num_waiting - deferred, "deferred": deferred}


def _success(scrape: Scrape) -> Mapping[str, int]:
    return dict.fromkeys(("stop", "length", "abort", "error"), 0) | scrape.totals.success


def _sources(scrape: Scrape) -> Mapping[str, int]:
    cached = scrape.totals.cached_prompt_tokens
    return {"local_compute": scrape.totals.prompt_tokens - cached, "local_cache_hit": cached}


def _number(
    kind: Literal["counter", "gauge"],
    name: str,
    meaning: str,
    read: Callable[[Scrape], float],
    *more_aliases: str,
    of_engine: bool = False,
) -> NumberFamily:
    return NumberFamily(
        name=name,
        kind=kind,
        help=meaning,
        rows=lambda scrape: [(_BARE, read(scrape))],
        aliases=(name, *more_aliases),
        of_engine=of_engine,
    )


def _gauge(
    name: str, meaning: str, read: Callable[[Scrape], float], *more: str, of_engine: bool = False
) -> NumberFamily:
    return _number("gauge", name, meaning, read, *more, of_engine=of_engine)


def _counter(
    name: str, meaning: str, read: Callable[[Scrape], float], *more: str, of_engine: bool = False
) -> NumberFamily:
    return _number("counter", name, meaning, read, *more, of_engine=of_engine)


def _histogram(
    name: str, meaning: str, read: Callable[[Scrape], Histogram], *more: str, of_engine: bool = False
) -> HistogramFamily:
    return HistogramFamily(name=name, help=meaning, read=read, aliases=(name, *more), of_engine=of_engine)


FAMILIES: tuple[NumberFamily | HistogramFamily, ...] = (
    _gauge("num_requests_running", "Choices in the running batch.", lambda scrape: scrape.gauges.num_running),
    _gauge(
        "num_requests_waiting",
        "Choices that wait for their place in it, preempted ones included.",
        lambda scrape: scrape.gauges.num_waiting,
    ),
    NumberFamily(
        name="num_requests_waiting_by_reason",
        kind="gauge",
        help="The waiting choices by what the first in line waits for; `vllm:` tells capacity and deferred apart.",
        rows=_by("reason", _waiting),
        labels=("reason",),
        aliases=("num_requests_waiting_by_reason",),
        alias_rows=_by("reason", _waiting_coarse),
    ),
    _gauge(
        "kv_cache_usage_perc",
        "Share of the K/V blocks that requests hold, 0 to 1.",
        lambda scrape: scrape.gauges.kv_cache_usage,
        "gpu_cache_usage_perc",
        of_engine=True,
    ),
    NumberFamily(
        name="cache_config_info",
        kind="gauge",
        help="The K/V cache's settings, as labels of a 1.",
        rows=lambda scrape: [(scrape.cache_config, 1.0)] if scrape.cache_config else [],
        labels=("block_size", "num_gpu_blocks", "enable_prefix_caching", "gpu_memory_utilization", "eviction"),
        aliases=("cache_config_info",),
    ),
    _counter(
        "prefix_cache_queries",
        "Prompt tokens that the prefix cache was asked for.",
        lambda scrape: scrape.totals.engine.prefix_cache_queries,
        "gpu_prefix_cache_queries",
        of_engine=True,
    ),
    _counter(
        "prefix_cache_hits",
        "Those of them that it had.",
        lambda scrape: scrape.totals.engine.prefix_cache_hits,
        "gpu_prefix_cache_hits",
        of_engine=True,
    ),
    _counter(
        "num_preemptions",
        "Requests that lost their place in the batch for want of a block.",
        lambda scrape: scrape.totals.engine.num_preemptions,
        of_engine=True,
    ),
    _counter(
        "prompt_tokens",
        "Prompt tokens of requests that have started, cached ones included; a prompt counts once, whatever n is.",
        lambda scrape: scrape.totals.prompt_tokens,
    ),
    NumberFamily(
        name="prompt_tokens_by_source",
        kind="counter",
        help="The same, by where they came from.",
        rows=_by("source", _sources),
        labels=("source",),
        aliases=("prompt_tokens_by_source",),
    ),
    _counter(
        "prompt_tokens_cached",
        "Those of them that the prefix cache saved.",
        lambda scrape: scrape.totals.cached_prompt_tokens,
    ),
    _counter(
        "generation_tokens",
        "Tokens generated for users; none that came after a stop string.",
        lambda scrape: scrape.totals.generation_tokens,
    ),
    NumberFamily(
        name="request_success",
        kind="counter",
        help="Choices that have ended, aborted ones included, by finish reason.",
        rows=_by("finished_reason", _success),
        labels=("finished_reason",),
        aliases=("request_success",),
    ),
    NumberFamily(
        name="admission_rejections",
        kind="counter",
        help="Requests that were refused, by reason.",
        rows=_by("reason", lambda scrape: scrape.totals.rejections),
        labels=("reason",),
        aliases=("admission_rejections",),
    ),
    _histogram(
        "time_to_first_token_seconds",
        "From a request's arrival to the first token of any of its choices.",
        lambda scrape: scrape.totals.first_token_seconds,
    ),
    _histogram(
        "inter_token_latency_seconds",
        "Between a choice's tokens.",
        lambda scrape: scrape.totals.inter_token_seconds,
        "time_per_output_token_seconds",
    ),
    _histogram(
        "request_time_per_output_token_seconds",
        "Of a choice: from its first to its last token, divided by the tokens after the first.",
        lambda scrape: scrape.totals.seconds_per_output_token,
    ),
    _histogram(
        "e2e_request_latency_seconds",
        "From a request's arrival to its end.",
        lambda scrape: scrape.totals.request_seconds,
    ),
    _histogram(
        "request_queue_time_seconds",
        "Of a choice: from when it was queued to when it was last scheduled before its first token.",
        lambda scrape: scrape.totals.queue_seconds,
    ),
    _histogram(
        "request_inference_time_seconds",
        "Of a choice: from then to its last token.",
        lambda scrape: scrape.totals.inference_seconds,
    ),
    _histogram(
        "request_prefill_time_seconds",
        "Of a choice: from then to its first token.",
        lambda scrape: scrape.totals.prefill_seconds,
    ),
    _histogram(
        "request_decode_time_seconds",
        "Of a choice: from its first to its last token.",
        lambda scrape: scrape.totals.decode_seconds,
    ),
    _histogram(
        "request_prompt_tokens", "Of a request that has ended.", lambda scrape: scrape.totals.prompt_tokens_of_request
    ),
    _histogram(
        "request_generation_tokens",
        "Of a choice that has ended.",
        lambda scrape: scrape.totals.generation_tokens_of_choice,
    ),
    _histogram(
        "request_max_num_generation_tokens",
        "The longest of a request's choices.",
        lambda scrape: scrape.totals.longest_choice,
    ),
    _histogram("request_params_n", "`n` of requests that have ended.", lambda scrape: scrape.totals.n),
    _histogram(
        "request_params_max_tokens",
        "`max_tokens` of those that said one.",
        lambda scrape: scrape.totals.max_tokens,
    ),
    _histogram(
        "request_prefill_kv_computed_tokens",
        "Prompt tokens of a request that the prefix cache did not save.",
        lambda scrape: scrape.totals.computed_tokens_of_request,
    ),
    _histogram(
        "iteration_tokens_total",
        "Tokens of a step, prefill and decode together.",
        lambda scrape: scrape.totals.step_tokens,
        of_engine=True,
    ),
    NumberFamily(
        name="engine_steps",
        kind="counter",
        help="Steps that engines have scheduled.",
        rows=lambda scrape: [(_BARE, scrape.totals.engine.num_steps)],
        of_engine=True,
    ),
    NumberFamily(
        name="step_seconds",
        kind="counter",
        help="Seconds of steps, from beginning to end, the model included.",
        rows=lambda scrape: [(_BARE, scrape.totals.engine.step_seconds)],
        of_engine=True,
    ),
    NumberFamily(
        name="plugin_seconds",
        kind="counter",
        help="Seconds in a plugin's method, what it spent in other timed plugins taken out.",
        rows=_labelled(_PLUGIN_LABELS, lambda scrape: scrape.totals.plugin_seconds),
        labels=_PLUGIN_LABELS,
        of_engine=True,
    ),
    NumberFamily(
        name="plugin_calls",
        kind="counter",
        help="Calls of it.",
        rows=_labelled(_PLUGIN_LABELS, lambda scrape: scrape.totals.plugin_calls),
        labels=_PLUGIN_LABELS,
        of_engine=True,
    ),
    NumberFamily(
        name="plugin_budget_exceeded",
        kind="counter",
        help="Windows of 100 steps in which plugins took more than `plugins.budget_us` a step.",
        rows=lambda scrape: [(_BARE, scrape.totals.engine.num_over_budget)],
        of_engine=True,
    ),
    NumberFamily(
        name="shadow_decisions",
        kind="counter",
        help="Decisions that `scheduler.shadow` was compared at, and whether it would have made the same.",
        rows=_labelled(_SHADOW_LABELS, lambda scrape: scrape.totals.shadow_decisions),
        labels=_SHADOW_LABELS,
        of_engine=True,
    ),
    NumberFamily(
        name="dropped",
        kind="counter",
        help="What was dropped because nobody took it: frames between processes, spans, log lines.",
        rows=_by("what", lambda scrape: scrape.dropped),
        labels=("what",),
    ),
)
"""In the order in which they are told."""
