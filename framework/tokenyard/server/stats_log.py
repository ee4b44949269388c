"""The line about running and waiting requests that the server logs every now and then, in vLLM's words."""

from __future__ import annotations

import collections
import logging
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenyard.server.monitor import Snapshot

_HIT_RATE_INTERVALS = 30  # the last ones in which the prefix cache was asked


class LogLine(NamedTuple):
    """One line and its level."""

    level: int
    text: str


class _Past(NamedTuple):
    """What had been counted at the last line."""

    at: float
    computed_tokens: int
    generation_tokens: int
    num_preemptions: int
    queries: int
    hits: int


class StatsLog:
    """Makes the lines. Rates are over the time since the last one; times in seconds."""

    def __init__(self, now: float) -> None:
        self._past = _Past(now, 0, 0, 0, 0, 0)
        self._was_idle = True  # before the first request there is nothing to tell
        self._lookups: collections.deque[tuple[int, int]] = collections.deque(maxlen=_HIT_RATE_INTERVALS)

    def line(self, snapshot: Snapshot, now: float) -> LogLine | None:
        """At DEBUG when nothing moved in this interval and the one before; None where the engine tells nothing."""
        if not snapshot.has_stats:
            return None
        totals, past = snapshot.totals, self._past
        self._past = _Past(
            now,
            totals.computed_prompt_tokens,
            totals.generation_tokens,
            totals.engine.num_preemptions,
            totals.engine.prefix_cache_queries,
            totals.engine.prefix_cache_hits,
        )
        seconds = max(now - past.at, 1e-9)
        computed = self._past.computed_tokens - past.computed_tokens
        generated = self._past.generation_tokens - past.generation_tokens
        if queries := self._past.queries - past.queries:
            self._lookups.append((queries, self._past.hits - past.hits))
        is_idle = not computed and not generated
        level = logging.DEBUG if is_idle and self._was_idle else logging.INFO
        self._was_idle = is_idle
        preemptions = self._past.num_preemptions - past.num_preemptions
        return LogLine(level, self._text(snapshot, computed / seconds, generated / seconds, preemptions))

    def _text(self, snapshot: Snapshot, prompt_rate: float, generation_rate: float, num_preemptions: int) -> str:
        gauges = snapshot.gauges
        parts = [
            f"Avg prompt throughput: {prompt_rate:.1f} tokens/s",
            f"Avg generation throughput: {generation_rate:.1f} tokens/s",
            f"Running: {gauges.num_running} reqs",
            f"Waiting: {gauges.num_waiting} reqs",
        ]
        if gauges.num_deferred:
            parts.append(f"Deferred: {gauges.num_deferred} reqs")
        if num_preemptions:
            parts.append(f"Preemptions: {num_preemptions}")
        queries, hits = (sum(column) for column in zip(*self._lookups, strict=True)) if self._lookups else (0, 0)
        parts.append(f"GPU KV cache usage: {100 * gauges.kv_cache_usage:.1f}%")
        parts.append(f"Prefix cache hit rate: {100 * hits / queries if queries else 0.0:.1f}%")
        return "Engine 000: " + ", ".join(parts)
