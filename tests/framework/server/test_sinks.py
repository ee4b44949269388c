"""Spans, log lines: where they go may be slow, dead or full, and nobody waits for it (2.3 #24)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from http_server import ThreadServer, running_server, wait_for
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from prometheus_client.parser import text_string_to_metric_families
from tokenyard.errors import ConfigError, UserError
from tokenyard.server import tracing
from tokenyard.server.monitor import Monitor
from tokenyard.server.request_log import RequestLog
from tokenyard.server.sink import BoundedSink
from tokenyard.server.stats_log import LogLine, StatsLog
from tokenyard.server.tracing import Tracing, check_tracing
from watched_engine import WatchedEngine

SMALL = ("kv_cache.block_size=4",)
SECRET = "a canary among the prompts"


# Sinks


@given(st.integers(1, 20), st.integers(0, 60))
def test_a_sink_that_hangs_drops_what_does_not_fit_and_counts_it(size: int, num_items: int) -> None:
    release, entered = threading.Event(), threading.Event()
    written: list[int] = []

    def write(batch: Sequence[int]) -> None:
        entered.set()
        release.wait(60)
        written.extend(batch)

    sink: BoundedSink[int] = BoundedSink("test", write, size=size)
    if num_items:
        sink.offer(0)
        entered.wait(60)  # the first one is on its way, so the queue is empty
    for item in range(1, num_items):
        sink.offer(item)
    assert sink.num_dropped == max(0, num_items - 1 - size)
    release.set()
    sink.close(60)
    assert written == list(range(min(num_items, size + 1)))
    sink.offer(1)
    assert len(written) + sink.num_dropped == num_items + 1


def test_a_sink_that_fails_counts_what_it_lost_and_complains_once(caplog: pytest.LogCaptureFixture) -> None:
    def write(batch: Sequence[int]) -> None:
        raise OSError("no space left on device")

    sink: BoundedSink[int] = BoundedSink("test", write, size=100)
    with caplog.at_level(logging.WARNING):
        for item in range(20):
            sink.offer(item)
        sink.close(60)
    assert sink.num_dropped == 20
    assert [message for message in caplog.messages if "no space" in message] == caplog.messages[:1]


def test_a_full_log_disk_reaches_no_step(tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """2.3 #24: the log goes to /dev/full."""
    handler = logging.FileHandler("/dev/full")
    logger = logging.getLogger("tokenyard")
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        overrides = ("server.log_requests=true", "server.log_stats_interval=0.05")
        with running_server(overrides, model=tiny_llama_dir) as server:
            for _ in range(5):
                assert _complete(server) == 4
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        handler.stream = None  # closing it would fail once more
        handler.close()
    assert "No space left" in capsys.readouterr().err


def _complete(server: ThreadServer, **more: object) -> int:
    answer = server.client.completions.create(  # type: ignore[call-overload]
        model=server.service.model_names[0],
        prompt=[5, 6, 7],
        max_tokens=4,
        extra_body={"ignore_eos": True},
        **more,
    )
    assert answer.usage is not None
    count: int = answer.usage.completion_tokens
    return count


# Lines about requests


def _logged(engine: WatchedEngine) -> list[LogLine]:
    lines: list[LogLine] = []
    engine.monitor.listen(RequestLog(lines.append))
    return lines


def test_a_line_at_the_arrival_and_one_at_the_end_and_no_text() -> None:
    engine = WatchedEngine(*SMALL)
    lines = _logged(engine)
    engine.add("a", 6, max_tokens=3, stop=SECRET, temperature=0.5)
    engine.run()
    assert [line.text for line in lines] == [
        "request a: 6 prompt tokens, n=1, max_tokens=3, temperature=0.5",
        "request a: ended (length) after 3.000 s, first token after 1.000 s, 3 tokens, 0 of 6 prompt tokens cached",
    ]
    assert not any(SECRET in line.text for line in lines)


# The periodic line


def test_the_line_is_vllms_word_for_word() -> None:
    engine = WatchedEngine(*SMALL, "scheduler.max_num_seqs=2", "kv_cache.num_blocks=20")
    log = StatsLog(100.0)
    engine.add("a", 8, max_tokens=12)
    engine.step()
    engine.add("again", 8, max_tokens=12)  # the first block of its two is cached
    engine.add("late", 8, first=60, max_tokens=12)
    engine.step()
    line = log.line(engine.monitor.snapshot(), 102.0)
    assert line is not None
    assert line.level == logging.INFO
    usage = 100 * engine.harness.stats.kv_cache_usage
    assert line.text == (
        "Engine 000: Avg prompt throughput: 6.0 tokens/s, Avg generation throughput: 1.5 tokens/s, Running: 2 reqs, "
        f"Waiting: 1 reqs, GPU KV cache usage: {usage:.1f}%, Prefix cache hit rate: 25.0%"
    )


def test_deferred_and_preempted_stand_there_when_there_are_any() -> None:
    engine = WatchedEngine("kv_cache.block_size=4", "kv_cache.num_blocks=6", "model.max_model_len=24")
    for number in range(4):
        engine.add(str(number), 6, first=30 * number, max_tokens=12)
    engine.run()
    line = StatsLog(0.0).line(engine.monitor.snapshot(), 10.0)
    assert line is not None
    count = engine.harness.stats.num_preemptions
    assert f"Waiting: 0 reqs, Preemptions: {count}, GPU KV cache usage: 0.0%" in line.text


def test_idle_twice_is_told_at_debug_and_without_stats_nothing_is_told() -> None:
    engine = WatchedEngine(*SMALL)
    log = StatsLog(0.0)

    def level(now: float) -> int:
        line = log.line(engine.monitor.snapshot(), now)
        assert line is not None
        return line.level

    assert [level(1.0), level(2.0)] == [logging.DEBUG] * 2  # nothing has been active yet
    engine.add("a", 8, max_tokens=2)
    engine.run()
    assert [level(3.0), level(4.0), level(5.0)] == [logging.INFO, logging.INFO, logging.DEBUG]
    assert StatsLog(0.0).line(Monitor(10, has_stats=False).snapshot(), 1.0) is None


@pytest.mark.parametrize(("log_requests", "level"), [("true", logging.INFO), ("false", logging.DEBUG)])
def test_the_server_logs_it_and_the_lines_about_requests(
    tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture, log_requests: str, level: int
) -> None:
    overrides = (f"server.log_requests={log_requests}", "server.log_stats_interval=0.02")
    with caplog.at_level(level, "tokenyard.server"), running_server(overrides, model=tiny_llama_dir) as server:
        _complete(server, extra_headers={"X-Request-Id": "my-label"})
        wait_for(lambda: any("(my-label): ended (length)" in text for text in caplog.messages), "no line")
        wait_for(lambda: any(text.startswith("Engine 000: Avg prompt") for text in caplog.messages), "no line")


# Spans


class Collector:
    """Takes spans by OTLP; with `hangs`, answers nobody until the end."""

    def __init__(self, *, hangs: bool = False) -> None:
        self.spans: list[Span] = []
        self.has_been_asked = threading.Event()
        release = self.release = threading.Event()
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.has_been_asked.set()
                if hangs:
                    release.wait(60)
                found = ExportTraceServiceRequest.FromString(_plain(body, self.headers.get("Content-Encoding")))
                for resource in found.resource_spans:
                    for scope in resource.scope_spans:
                        collector.spans.extend(scope.spans)
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *arguments: object) -> None:  # noqa: A002  # its name there
                pass

        self.http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.http.server_port}/v1/traces"
        self._thread = threading.Thread(target=self.http.serve_forever, name="collector")
        self._thread.start()

    def close(self) -> None:
        self.release.set()
        self.http.shutdown()
        self._thread.join()
        self.http.server_close()


def _plain(body: bytes, encoding: str | None) -> bytes:
    import gzip

    return gzip.decompress(body) if encoding == "gzip" else body


@pytest.fixture
def collector() -> Iterator[Callable[..., Collector]]:
    made: list[Collector] = []

    def make(*, hangs: bool = False) -> Collector:
        made.append(Collector(hangs=hangs))
        return made[-1]

    yield make
    for one in made:
        one.close()


def _attributes(span: Span) -> dict[str, object]:
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in span.attributes}


def test_each_request_is_a_span_of_its_clients_trace(tiny_llama_dir: Path, collector: Callable[..., Collector]) -> None:
    found = collector()
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    with running_server((f"server.otlp_traces_endpoint={found.url}",), model=tiny_llama_dir) as server:
        _complete(server, extra_headers={"traceparent": f"00-{trace}-{parent}-01"})
        _complete(server, extra_headers={"traceparent": f"00-{trace}-{parent}-00"})  # nobody wants this one recorded
        _complete(server, extra_headers={"traceparent": "nonsense"})
        wait_for(lambda: len(found.spans) == 2, "no spans")
    ours, other = found.spans
    assert (ours.trace_id.hex(), ours.parent_span_id.hex()) == (trace, parent)
    assert other.trace_id.hex() != trace
    assert ours.name == "llm_request"
    values = _attributes(ours)
    assert values["gen_ai.usage.prompt_tokens"] == values["gen_ai.usage.input_tokens"] == 3
    assert values["gen_ai.usage.completion_tokens"] == 4
    assert values["gen_ai.request.max_tokens"] == 4
    assert values["url.path"] == "/v1/completions"
    first, whole = values["gen_ai.latency.time_to_first_token"], values["gen_ai.latency.e2e"]
    assert isinstance(first, float)
    assert isinstance(whole, float)
    assert 0 < first <= whole
    assert (ours.end_time_unix_nano - ours.start_time_unix_nano) / 1e9 == pytest.approx(whole, abs=1e-3)


def test_a_collector_that_hangs_holds_nobody_up(tiny_llama_dir: Path, collector: Callable[..., Collector]) -> None:
    """2.3 #24."""
    found = collector(hangs=True)
    with running_server((f"server.otlp_traces_endpoint={found.url}",), model=tiny_llama_dir) as server:
        for _ in range(10):
            assert _complete(server) == 4
        assert found.has_been_asked.wait(60)
        assert not found.spans
        found.release.set()


class RefusingExporter:
    """A collector that takes nothing."""

    def export(self, spans: Sequence[ReadableSpan], /) -> SpanExportResult:
        return SpanExportResult.FAILURE

    def shutdown(self) -> None:
        pass


def test_spans_that_nobody_takes_are_counted() -> None:
    traced = Tracing(RefusingExporter(), "tiny")
    engine = WatchedEngine(*SMALL)
    engine.monitor.listen(traced)
    for name in "abc":
        engine.add(name, 4, max_tokens=2)
    engine.run()
    traced.close()
    assert traced.sink.num_dropped == 3


def test_what_was_dropped_stands_in_the_metrics(tiny_llama_dir: Path) -> None:
    with running_server(("server.otlp_traces_endpoint=http://127.0.0.1:9/v1/traces",), model=tiny_llama_dir) as server:
        sink = server.service.observation.tracing_sink
        assert sink is not None
        sink.close()
        _complete(server)
        families = {one.name: one for one in text_string_to_metric_families(server.get("/metrics")[1])}
        dropped = {sample.labels["what"]: sample.value for sample in families["tokenyard:dropped"].samples}
        assert dropped == {"frames": 0, "log_lines": 0, "spans": 1}


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "file:///etc/passwd", "http://", "ftp://x/y"])
def test_an_endpoint_that_is_no_url_is_refused(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is no http"):
        check_tracing(endpoint)


def test_without_the_extra_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracing, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'tokenyard\[otel\]'"):
        check_tracing("http://127.0.0.1:4318/v1/traces")
    check_tracing(None)
