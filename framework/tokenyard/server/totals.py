"""Totals: what a server has counted since its start, whatever became of its engines."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from tokenyard.server.histogram import (
    CHOICE_BOUNDS,
    ITERATION_BOUNDS,
    LATENCY_BOUNDS,
    TOKEN_TIME_BOUNDS,
    TTFT_BOUNDS,
    Histogram,
)
from tokenyard.server.waits import DEFERRED, UNTOLD

if TYPE_CHECKING:
    from tokenyard.engine_outputs import PluginStats, SchedulerStats, ShadowStats
    from tokenyard.server.watched import EndedRequest, WatchedChoice

PluginLabels: TypeAlias = tuple[str, str, str]  # kind, plugin, point
ShadowLabels: TypeAlias = tuple[str, str]  # point, whether the shadow policy agrees: "true" or "false"


@dataclass(slots=True, kw_only=True)
class Gauges:
    """How things are now."""

    num_running: int = 0  # choices that have their place in the batch
    num_waiting: int = 0  # the other ones
    num_deferred: int = 0  # of the waiting: the policy holds them back
    waiting_by_reason: Mapping[str, int] = field(default_factory=dict)
    kv_cache_usage: float = 0.0  # 0 to 1


@dataclass(slots=True, kw_only=True)
class Counters:
    """Of the engine since its start, added up over engines."""

    num_steps: int = 0
    num_preemptions: int = 0
    prefix_cache_queries: int = 0  # tokens
    prefix_cache_hits: int = 0
    step_seconds: float = 0.0
    num_over_budget: int = 0  # windows of steps: see PluginStats


class Totals:
    """Everything that only grows. Tokens and seconds."""

    def __init__(self, token_bounds: tuple[float, ...]) -> None:
        self.engine = Counters()
        self.prompt_tokens = 0  # of requests that have started, once a request
        self.cached_prompt_tokens = 0  # those of them that the prefix cache saved
        self.computed_prompt_tokens = 0  # by steps, those that a preemption made them compute again included
        self.generation_tokens = 0
        self.success: dict[str, int] = {}  # choices that have ended, by finish reason
        self.rejections: dict[str, int] = {}  # requests that were refused, by reason
        self.plugin_seconds: dict[PluginLabels, float] = {}
        self.plugin_calls: dict[PluginLabels, int] = {}
        self.shadow_decisions: dict[ShadowLabels, int] = {}
        # Of each choice
        self.generation_tokens_of_choice = Histogram(token_bounds)
        self.inter_token_seconds = Histogram(TOKEN_TIME_BOUNDS)
        self.seconds_per_output_token = Histogram(TOKEN_TIME_BOUNDS)
        self.queue_seconds = Histogram(LATENCY_BOUNDS)
        self.prefill_seconds = Histogram(LATENCY_BOUNDS)
        self.decode_seconds = Histogram(LATENCY_BOUNDS)
        self.inference_seconds = Histogram(LATENCY_BOUNDS)
        # Of each request
        self.first_token_seconds = Histogram(TTFT_BOUNDS)
        self.request_seconds = Histogram(LATENCY_BOUNDS)
        self.prompt_tokens_of_request = Histogram(token_bounds)
        self.computed_tokens_of_request = Histogram(token_bounds)
        self.longest_choice = Histogram(token_bounds)
        self.n = Histogram(CHOICE_BOUNDS)
        self.max_tokens = Histogram(token_bounds)
        # Of each step
        self.step_tokens = Histogram(ITERATION_BOUNDS)

    def reject(self, reason: str, times: int = 1) -> None:
        """Requests will not run."""
        self.rejections[reason] = self.rejections.get(reason, 0) + times

    def copy(self) -> Totals:
        """As they are now."""
        made = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, Histogram):
                setattr(made, name, value.copy())
            elif not isinstance(value, int):
                setattr(made, name, copy.copy(value))
        return made


class EngineCounters:
    """Adds an engine's own counters to the totals."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """The next counters are those of another engine, which began at nought."""
        self._last = Counters()
        self._last_rejected: Mapping[str, int] = {}
        self._last_plugins: PluginStats | None = None
        self._last_shadow: ShadowStats | None = None

    def add(self, stats: SchedulerStats, totals: Totals) -> None:
        """The engine's newest counters."""
        last, own = self._last, totals.engine
        own.num_steps += stats.num_steps - last.num_steps
        own.num_preemptions += stats.num_preemptions - last.num_preemptions
        own.prefix_cache_queries += stats.prefix_cache_queries - last.prefix_cache_queries
        own.prefix_cache_hits += stats.prefix_cache_hits - last.prefix_cache_hits
        self._last = Counters(
            num_steps=stats.num_steps,
            num_preemptions=stats.num_preemptions,
            prefix_cache_queries=stats.prefix_cache_queries,
            prefix_cache_hits=stats.prefix_cache_hits,
        )
        if stats.num_rejected_by_reason != self._last_rejected:
            for reason, count in stats.num_rejected_by_reason.items():
                if more := count - self._last_rejected.get(reason, 0):
                    totals.reject(reason, more)
            self._last_rejected = stats.num_rejected_by_reason
        if stats.plugins is not None and stats.plugins != self._last_plugins:
            self._add_plugins(stats.plugins, totals)
        if stats.shadow is not None and stats.shadow != self._last_shadow:
            self._add_shadow(stats.shadow, totals)

    def _add_shadow(self, shadow: ShadowStats, totals: Totals) -> None:
        last, self._last_shadow = self._last_shadow, shadow
        before = {one.point: one for one in (last.points if last else ())}
        for one in shadow.points:
            past = before.get(one.point)
            agreed, otherwise = (past.num_agreed, past.num_otherwise) if past else (0, 0)
            for agrees, more in (("true", one.num_agreed - agreed), ("false", one.num_otherwise - otherwise)):
                labels = (one.point, agrees)
                totals.shadow_decisions[labels] = totals.shadow_decisions.get(labels, 0) + more

    def _add_plugins(self, plugins: PluginStats, totals: Totals) -> None:
        last, self._last_plugins = self._last_plugins, plugins
        own = totals.engine
        own.step_seconds += plugins.step_seconds - (last.step_seconds if last else 0.0)
        own.num_over_budget += plugins.num_over_budget - (last.num_over_budget if last else 0)
        before = {one[:3]: (one.seconds, one.num_calls) for one in (last.times if last else ())}
        for one in plugins.times:
            labels = one[:3]
            seconds, num_calls = before.get(labels, (0.0, 0))
            totals.plugin_seconds[labels] = totals.plugin_seconds.get(labels, 0.0) + one.seconds - seconds
            totals.plugin_calls[labels] = totals.plugin_calls.get(labels, 0) + one.num_calls - num_calls


def count_end(totals: Totals, ended: EndedRequest) -> None:
    """A request has ended, with all its choices, however that came."""
    watched, request = ended.watched, ended.watched.request
    num_prompt_tokens = len(request.prompt.token_ids)
    totals.request_seconds.observe(ended.seconds)
    totals.prompt_tokens_of_request.observe(num_prompt_tokens)
    if watched.has_started:
        totals.computed_tokens_of_request.observe(num_prompt_tokens - request.num_cached_tokens)
    totals.longest_choice.observe(max(ended.num_tokens))
    totals.n.observe(request.params.n)
    if request.params.max_tokens is not None:
        totals.max_tokens.observe(request.params.max_tokens)
    for choice, reason, num_tokens in zip(watched.choices, ended.finish_reasons, ended.num_tokens, strict=True):
        totals.success[reason] = totals.success.get(reason, 0) + 1
        totals.generation_tokens_of_choice.observe(num_tokens)
        _count_times(totals, choice, num_tokens)


def _count_times(totals: Totals, choice: WatchedChoice, num_tokens: int) -> None:
    """Of a choice, as far as it came."""
    scheduled_at, first, last = choice.scheduled_at, choice.first_token_at, choice.last_token_at
    if scheduled_at is not None:
        totals.queue_seconds.observe(max(0.0, scheduled_at - choice.owner.request.arrival_time))
    if scheduled_at is None or first is None or last is None:
        return
    totals.prefill_seconds.observe(max(0.0, first - scheduled_at))
    totals.decode_seconds.observe(last - first)
    totals.inference_seconds.observe(max(0.0, last - scheduled_at))
    if num_tokens > 1:
        totals.seconds_per_output_token.observe((last - first) / (num_tokens - 1))


def gauges(*, num_running: int, num_waiting: int, num_deferred: int, stats: SchedulerStats | None) -> Gauges:
    """How things are: the server's own counts, with the reasons that the engine told last."""
    reasons = {DEFERRED: num_deferred} if num_deferred else {}
    left = num_waiting - num_deferred
    for reason, told in ({} if stats is None else stats.num_waiting_by_reason).items():
        if reason != DEFERRED and (count := min(told, left)) > 0:
            reasons[reason] = count
            left -= count
    if left > 0:
        reasons[UNTOLD] = reasons.get(UNTOLD, 0) + left
    return Gauges(
        num_running=num_running,
        num_waiting=num_waiting,
        num_deferred=num_deferred,
        waiting_by_reason=reasons,
        kv_cache_usage=0.0 if stats is None else stats.kv_cache_usage,
    )
