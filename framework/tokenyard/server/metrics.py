"""GET /metrics: what the server has counted, as Prometheus reads it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import APIRouter, Request, Response

from tokenyard.server.metric_names import FAMILIES, HistogramFamily, NumberFamily
from tokenyard.server.service import Service, service_of

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric

    from tokenyard.server.histogram import Histogram
    from tokenyard.server.http_counts import HttpCounts
    from tokenyard.server.totals import Gauges, Totals

router = APIRouter(tags=["metrics"])

_ENGINE = "0"  # there is one engine a server


@dataclass(frozen=True, slots=True, kw_only=True)
class Scrape:
    """The numbers of one moment."""

    totals: Totals
    gauges: Gauges
    has_stats: bool  # whether the engine tells its own
    cache_config: Mapping[str, str]  # empty while there is no engine
    dropped: Mapping[str, int]
    http: HttpCounts


@router.get("/metrics", summary="Counters, gauges and histograms for Prometheus", response_class=Response)
def metrics(http: Request) -> Response:  # in a thread: it takes some milliseconds
    """In Prometheus' text format, or OpenMetrics where it is asked for."""
    from prometheus_client.exposition import choose_encoder  # 50 ms that the start has no time for

    encode, content_type = choose_encoder(http.headers.get("accept", ""))
    return Response(encode(_registry(service_of(http))), media_type=content_type)


def _registry(service: Service) -> CollectorRegistry:
    """Of this server alone; nothing global."""
    from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector

    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerCollector(service.observation.scrape(), service.model_names[0]))
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry


class ServerCollector:
    """One scrape as prometheus_client takes it."""

    def __init__(self, scrape: Scrape, model_name: str) -> None:
        self._scrape = scrape
        self._labels = {"model_name": model_name, "engine": _ENGINE}

    def collect(self) -> Iterator[Metric]:
        """Every family under each of its names."""
        for family in FAMILIES:
            if self._scrape.has_stats or not family.of_engine:
                for name in family.names:
                    yield self._made(name, family)
        yield from _http_metrics(self._scrape.http)

    def _made(self, name: str, family: NumberFamily | HistogramFamily) -> Metric:
        return self._histogram(name, family) if isinstance(family, HistogramFamily) else self._numbers(name, family)

    def _numbers(self, name: str, family: NumberFamily) -> Metric:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        is_alias = name != family.names[0]
        rows = family.alias_rows if is_alias and family.alias_rows is not None else family.rows
        labels = (*self._labels, *family.labels)
        kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        made = kind(name, family.help, labels=labels)
        for own, value in rows(self._scrape):
            made.add_metric([*self._labels.values(), *(own[label] for label in family.labels)], value)
        return made

    def _histogram(self, name: str, family: HistogramFamily) -> Metric:
        from prometheus_client.core import HistogramMetricFamily

        made = HistogramMetricFamily(name, family.help, labels=tuple(self._labels))
        histogram = family.read(self._scrape)
        made.add_metric(list(self._labels.values()), _buckets(histogram), histogram.total)
        return made


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    return [("+Inf" if math.isinf(bound) else repr(bound), float(count)) for bound, count in histogram.buckets()]


def _http_metrics(http: HttpCounts) -> Iterator[Metric]:
    """Under the names that others give to what an HTTP server answers."""
    from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

    answers = CounterMetricFamily("http_requests", "Answers.", labels=("handler", "method", "status"))
    for key, count in sorted(http.answers().items()):
        answers.add_metric(key, count)
    yield answers
    seconds = HistogramMetricFamily(
        "http_request_duration_seconds", "From a request to the end of its answer.", labels=("handler", "method")
    )
    for labels, histogram in sorted(http.seconds().items()):
        seconds.add_metric(labels, _buckets(histogram), histogram.total)
    yield seconds
