"""Observation: everything that watches over a server, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tokenyard.server.http_counts import HttpCounts
from tokenyard.server.monitor import Monitor
from tokenyard.server.request_log import RequestLog
from tokenyard.server.sink import BoundedSink
from tokenyard.server.stats_log import LogLine, StatsLog
from tokenyard.server.tracing import SpanFacts, Tracing, check_tracing, otlp_exporter
from tokenyard.server.watchdog import Watchdog

if TYPE_CHECKING:
    from tokenyard.async_llm import AsyncLLM
    from tokenyard.config import EngineConfig
    from tokenyard.server.metrics import Scrape
    from tokenyard.server.service import Service

logger = logging.getLogger("tokenyard.server")

_LOG_QUEUE = 4096  # lines that wait to be written; what comes beyond is dropped and counted


class Observation:
    """Of one server: numbers, timelines, log lines, spans and the watchdog. `monitor` and `http` are told things."""

    def __init__(self, config: EngineConfig, model_name: str) -> None:
        server = config.server
        self._config = config
        self.monitor = Monitor(server.timeline_size, has_stats=config.engine.log_stats)
        self.http = HttpCounts()
        self._log: BoundedSink[LogLine] = BoundedSink("log", _write_lines, size=_LOG_QUEUE)
        self._tracing: Tracing | None = None
        self._cache_config: Mapping[str, str] = {}
        self._frames_dropped_before = 0  # by engines that are gone
        self._num_dropped_frames: Callable[[], int] = lambda: 0
        if server.log_requests or logger.isEnabledFor(logging.DEBUG):
            self.monitor.listen(RequestLog(self._log.offer))
        if server.otlp_traces_endpoint is not None:
            check_tracing(server.otlp_traces_endpoint)
            self._tracing = Tracing(otlp_exporter(server.otlp_traces_endpoint), model_name)
            self.monitor.listen(self._tracing)

    def attach(self, llm: AsyncLLM) -> None:
        """Watch an engine from now on, before its first request."""
        facts, cache = llm.front.engine, self._config.kv_cache
        self.monitor.begin_engine(facts.max_model_len)
        self._cache_config = {
            "block_size": str(cache.block_size),
            "num_gpu_blocks": str(facts.num_blocks),
            "enable_prefix_caching": str(cache.enable_prefix_caching),
            "gpu_memory_utilization": str(cache.gpu_memory_utilization),
            "eviction": cache.eviction,
        }
        self._frames_dropped_before += self._num_dropped_frames()
        self._num_dropped_frames = llm.num_dropped_frames
        llm.watch(self.monitor)

    @property
    def tracing_sink(self) -> BoundedSink[SpanFacts] | None:
        """Where spans wait to be sent, if they are."""
        return None if self._tracing is None else self._tracing.sink

    def scrape(self) -> Scrape:
        """All numbers, of now."""
        from tokenyard.server.metrics import Scrape

        snapshot = self.monitor.snapshot()
        return Scrape(
            totals=snapshot.totals,
            gauges=snapshot.gauges,
            has_stats=snapshot.has_stats,
            cache_config=self._cache_config,
            dropped=self._dropped(),
            http=self.http,
        )

    @contextlib.asynccontextmanager
    async def running(self, service: Service) -> AsyncIterator[None]:
        """Watch and log until the end of the block."""
        tasks = [
            asyncio.create_task(work, name=name)
            for work, name in ((self._watch(service), "tokenyard-watchdog"), (self._log_stats(), "tokenyard-stats"))
        ]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.to_thread(self.close)

    def close(self) -> None:
        """Write what is left to be written, for a second at most."""
        self._log.close()
        if self._tracing is not None:
            self._tracing.close()

    def _dropped(self) -> dict[str, int]:
        frames = self._frames_dropped_before + self._num_dropped_frames()
        found = {"frames": frames, "log_lines": self._log.num_dropped}
        if self._tracing is not None:
            found["spans"] = self._tracing.sink.num_dropped
        return found

    async def _log_stats(self) -> None:
        interval = self._config.server.log_stats_interval
        if interval <= 0:
            return
        stats_log = StatsLog(time.monotonic())
        while True:
            await asyncio.sleep(interval)
            line = stats_log.line(self.monitor.snapshot(), time.monotonic())
            if line is not None and logger.isEnabledFor(line.level):
                self._log.offer(line)

    async def _watch(self, service: Service) -> None:
        watchdog = Watchdog(self._config.server.stall_timeout)
        while True:
            await asyncio.sleep(watchdog.poll_seconds)
            try:
                service.is_stalled = service.llm is not None and watchdog.look(
                    service.llm, may_compile=service.llm.front.engine.report.device != "cpu"
                )
            except Exception:
                logger.exception("the watchdog failed, and goes on")


def lifespan_of(service: Service) -> Callable[[object], contextlib.AbstractAsyncContextManager[None]]:
    """What an application of this service does between its start and its end."""
    return lambda app: service.observation.running(service)


def _write_lines(lines: Sequence[LogLine]) -> None:
    for line in lines:
        logger.log(line.level, "%s", line.text)
