"""A span for each request, sent to an OpenTelemetry collector. Needs the extra `otel`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from tokenyard.errors import ConfigError, UserError
from tokenyard.server.sink import BoundedSink

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan, Tracer
    from opentelemetry.sdk.trace.export import SpanExportResult

    from tokenyard.server.watched import EndedRequest, WatchedRequest

_QUEUE = 2048  # spans that wait to be sent; what comes beyond is dropped and counted
_TIMEOUT = 10  # seconds that a collector may take for a batch, retries included
_NAME = "llm_request"

AttributeValue = str | int | float | bool | Sequence[str]


class SpanExporter(Protocol):
    """What is needed of OpenTelemetry's exporters."""

    def export(self, spans: Sequence[ReadableSpan], /) -> SpanExportResult: ...
    def shutdown(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanFacts:
    """What a span will say."""

    traceparent: str | None
    start: float  # Unix seconds
    end: float
    attributes: Mapping[str, AttributeValue]
    error: str | None


def check_tracing(endpoint: str | None) -> None:
    """Raise where spans are wanted and cannot be sent: UserError without the extra, ConfigError for a wrong URL."""
    if endpoint is None:
        return
    parts = urlsplit(endpoint)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConfigError(
            f"server.otlp_traces_endpoint={endpoint!r} is no http(s) URL; give one such as "
            "http://127.0.0.1:4318/v1/traces"
        )
    if any(find_spec(name) is None for name in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter")):
        raise UserError(
            "server.otlp_traces_endpoint needs OpenTelemetry, which is not installed; install with: "
            "pip install 'tokenyard[otel]'"
        )


def otlp_exporter(endpoint: str) -> SpanExporter:
    """Sends spans by OTLP over HTTP; headers come from the OTEL_EXPORTER_OTLP_* environment variables."""
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # 50 ms, and an extra

    return OTLPSpanExporter(endpoint=endpoint, timeout=_TIMEOUT)


class Tracing:
    """An EndListener. Spans are made and sent in a thread of its own, whatever the collector does."""

    def __init__(self, exporter: SpanExporter, model_name: str) -> None:
        self._exporter = exporter
        self._model_name = model_name
        self._tracer: Tracer | None = None
        self.sink: BoundedSink[SpanFacts] = BoundedSink("spans", self._send, size=_QUEUE)

    def arrived(self, watched: WatchedRequest) -> None:
        """A span is made at the end."""

    def ended(self, ended: EndedRequest) -> None:
        watched = ended.watched
        start = watched.timeline.arrived_on
        is_error = "error" in ended.finish_reasons
        self.sink.offer(
            SpanFacts(
                traceparent=None if watched.context is None else watched.context.traceparent,
                start=start,
                end=start + ended.seconds,
                attributes=span_attributes(ended, self._model_name),
                error=(watched.timeline.error or "error") if is_error else None,
            )
        )

    def close(self) -> None:
        """Send what is there, for a second at most."""
        self.sink.close()
        self._exporter.shutdown()

    def _send(self, batch: Sequence[SpanFacts]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        spans = [span for span in map(self._span, batch) if span is not None]
        if spans and self._exporter.export(spans) is not SpanExportResult.SUCCESS:
            raise OSError("the collector does not take them")

    def _span(self, facts: SpanFacts) -> ReadableSpan | None:
        """None where whoever began the trace does not want it recorded."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanKind, Status, StatusCode
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {} if facts.traceparent is None else {"traceparent": facts.traceparent}
        span = self._made_tracer().start_span(
            _NAME,
            context=TraceContextTextMapPropagator().extract(carrier),
            kind=SpanKind.SERVER,
            attributes=facts.attributes,
            start_time=round(facts.start * 1e9),
        )
        if facts.error is not None:
            span.set_status(Status(StatusCode.ERROR, facts.error))
        span.end(round(facts.end * 1e9))
        return span if isinstance(span, ReadableSpan) else None

    def _made_tracer(self) -> Tracer:
        if self._tracer is None:
            from opentelemetry.sdk.resources import SERVICE_NAME, OTELResourceDetector, Resource
            from opentelemetry.sdk.trace import TracerProvider

            resource = Resource({SERVICE_NAME: "tokenyard"}).merge(OTELResourceDetector().detect())
            provider = TracerProvider(resource=resource, shutdown_on_exit=False)
            self._tracer = provider.get_tracer("tokenyard")  # type: ignore[assignment]
        return self._tracer  # type: ignore[return-value]


def span_attributes(ended: EndedRequest, model_name: str) -> dict[str, AttributeValue]:
    """Under OpenTelemetry's names for generative AI, and those that vLLM has besides. No text."""
    watched, params = ended.watched, ended.watched.request.params
    num_prompt_tokens, num_tokens = watched.timeline.num_prompt_tokens, sum(ended.num_tokens)
    attributes: dict[str, AttributeValue] = {
        "gen_ai.request.model": model_name,
        "gen_ai.response.model": model_name,
        "gen_ai.request.id": watched.timeline.request_id,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.n": params.n,
        "gen_ai.response.finish_reasons": ended.finish_reasons,
        "gen_ai.usage.num_sequences": params.n,
        "gen_ai.usage.prompt_tokens": num_prompt_tokens,
        "gen_ai.usage.input_tokens": num_prompt_tokens,
        "gen_ai.usage.completion_tokens": num_tokens,
        "gen_ai.usage.output_tokens": num_tokens,
        "gen_ai.latency.e2e": ended.seconds,
    }
    if params.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = params.max_tokens
    if watched.context is not None and watched.context.path:
        attributes["url.path"] = watched.context.path
    return attributes | _latencies(watched)


def _latencies(watched: WatchedRequest) -> dict[str, AttributeValue]:
    """Seconds, of the first choice, as far as it came."""
    choice, first_token_at = watched.choices[0], watched.first_token_at
    found: dict[str, AttributeValue] = {}
    if first_token_at is not None:
        found["gen_ai.latency.time_to_first_token"] = first_token_at - watched.arrived_at
    if choice.scheduled_at is not None:
        found["gen_ai.latency.time_in_queue"] = choice.scheduled_at - watched.request.arrival_time
        if choice.first_token_at is not None and choice.last_token_at is not None:
            found["gen_ai.latency.time_in_model_prefill"] = choice.first_token_at - choice.scheduled_at
            found["gen_ai.latency.time_in_model_decode"] = choice.last_token_at - choice.first_token_at
            found["gen_ai.latency.time_in_model_inference"] = choice.last_token_at - choice.scheduled_at
    return found
