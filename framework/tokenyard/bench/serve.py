"""`tokenyard bench serve`: what a server of OpenAI's API does under load, seen from its client."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenyard.bench import serve_metrics, server_facts
from tokenyard.bench.arrivals import send_times
from tokenyard.bench.load import Record, Send, run_load
from tokenyard.bench.prompt_text import ask_texts, local_tokenizer, write_texts
from tokenyard.bench.report import machine
from tokenyard.bench.serve_workload import DEFAULT_VOCAB_SIZE, LoadRequest, draw, load_request
from tokenyard.client.connection import Connection
from tokenyard.client.endpoint import find_endpoint
from tokenyard.client.models import choose_model, list_models
from tokenyard.errors import TokenyardError

if TYPE_CHECKING:
    from tokenyard.bench.serve_settings import ServeBench
    from tokenyard.client.chunks import Chunk
    from tokenyard.model.tokenizer import Tokenizer

Tell = Callable[[str], None]
OnEnd = Callable[[], None]


class ServeRun(NamedTuple):
    """A finished benchmark."""

    row: dict[str, object]
    records: Sequence[Record]


class _Workload(NamedTuple):
    warm_up: list[LoadRequest]
    timed: list[LoadRequest]
    send_times: list[float]


async def run_serve_bench(settings: ServeBench, tell: Tell, on_end: OnEnd) -> ServeRun:
    """Warm up, send all requests, and read what came. `tell` gets lines about what goes on.

    Raises RemoteError when the server cannot be used, TokenyardError when no request succeeds.
    """
    endpoint, around = find_endpoint(settings.url, "--base-url"), machine()
    async with Connection(endpoint, timeout=settings.timeout, is_verified=not settings.insecure) as connection:
        names = await list_models(connection, settings.ready_check_timeout_sec)
        model = choose_model(names, settings.model, endpoint.root)
        version = await server_facts.read_version(connection)
        workload = await _workload(settings, model, connection, tell)
        send = _sender(settings, connection)
        await _warm_up(workload.warm_up, send)
        before = await server_facts.read_counters(connection)
        cpu = time.process_time()
        records = await run_load(
            workload.timed, workload.send_times, settings.max_concurrency, send, time.perf_counter, on_end
        )
        cpu = time.process_time() - cpu
        after = await server_facts.read_counters(connection)
    _refuse_total_failure(records)
    facts = {"server": endpoint.root, "server_version": version, "server_counted": _difference(before, after)}
    return ServeRun({**_given(settings, model), **_figures(settings, records, cpu), **facts, **around}, records)


async def _workload(settings: ServeBench, model: str, connection: Connection, tell: Tell) -> _Workload:
    tokenizer = None if settings.tokenizer is None else local_tokenizer(settings.tokenizer, tell)
    vocab_size = settings.vocab_size or (DEFAULT_VOCAB_SIZE if tokenizer is None else tokenizer.vocab_size)
    rng = np.random.default_rng(settings.seed)
    drawn = draw(settings, vocab_size, settings.num_prompts, rng)
    times = send_times(settings.num_prompts, settings.rate, settings.shape, rng)
    other = draw(settings, vocab_size, settings.num_warmups, rng)  # not one whose K/V a prefix cache could reuse
    texts = await _texts(settings, model, connection, tokenizer, [one.tokens for one in (*drawn, *other)])
    requests = [load_request(settings, model, one, text) for one, text in zip((*drawn, *other), texts, strict=True)]
    return _Workload(requests[len(drawn) :], requests[: len(drawn)], times.tolist())


async def _texts(
    settings: ServeBench,
    model: str,
    connection: Connection,
    tokenizer: Tokenizer | None,
    prompts: Sequence[Sequence[int]],
) -> Sequence[str | None]:
    if not settings.sends_text:
        return [None] * len(prompts)
    return await ask_texts(connection, model, prompts) if tokenizer is None else write_texts(tokenizer, prompts)


def _sender(settings: ServeBench, connection: Connection) -> Send:
    route, headers = settings.route, settings.headers

    def send(request: LoadRequest) -> AsyncGenerator[Chunk, None]:
        return connection.stream(route, request.body, headers)

    return send


async def _warm_up(requests: Sequence[LoadRequest], send: Send) -> None:
    """One after the other; the first failure ends the benchmark before it begins."""
    for request in requests:
        (record,) = await run_load([request], [0.0], None, send, time.perf_counter)
        if record.error is not None:
            raise TokenyardError(f"the first request, which warms up, failed: {record.error}")


def _refuse_total_failure(records: Sequence[Record]) -> None:
    if records and all(record.error is not None for record in records):
        error, count = next(iter(serve_metrics.errors(records).items()))
        raise TokenyardError(f"none of {len(records)} requests succeeded; {count} of them: {error}")


def _given(settings: ServeBench, model: str) -> dict[str, object]:
    """What was asked for, under the names of `vllm bench serve`."""
    return {
        "benchmark": "serve",
        "backend": settings.backend,
        "endpoint": settings.route,
        "model_id": model,
        "num_prompts": settings.num_prompts,
        "request_rate": "inf" if math.isinf(settings.rate) else settings.rate,
        "burstiness": "inf" if math.isinf(settings.shape) else settings.shape,
        "max_concurrency": settings.max_concurrency,
        "loop": "closed" if settings.max_concurrency is not None and math.isinf(settings.rate) else "open",
        "prompts": "text" if settings.sends_text else "token_ids",
        "input_len": settings.random_input_len,
        "output_len": settings.random_output_len,
        "range_ratio": settings.random_range_ratio,
        "prefix_len": settings.random_prefix_len,
        "seed": settings.seed,
        "ignore_eos": settings.ignore_eos,
        "num_warmups": settings.num_warmups,
        "goodput_slos_ms": {name: 1000 * seconds for name, seconds in settings.slos.items()},
    }


def _figures(settings: ServeBench, records: Sequence[Record], cpu: float) -> dict[str, object]:
    found = serve_metrics.figures(records, settings.percentiles, settings.slos)
    num_chunks = sum(record.num_chunks for record in records)
    span = max((record.ended or record.sent) for record in records) - min(record.sent for record in records)
    return {
        **found,
        **serve_metrics.wrong_counts(records, must_be_full=settings.ignore_eos),
        "errors": serve_metrics.errors(records),
        "num_chunks": num_chunks,
        "client_cpu_s": round(cpu, 3),
        "client_cpu_share": round(cpu / span, 4) if span > 0 else None,
        "client_us_per_chunk": round(1e6 * cpu / num_chunks, 1) if num_chunks else None,
        "max_late_ms": round(1000 * max(record.sent - record.due for record in records), 3),
    }


def _difference(before: Mapping[str, int] | None, after: Mapping[str, int] | None) -> dict[str, int] | None:
    """What the server counted meanwhile, also of others' requests."""
    if before is None or after is None:
        return None
    return {name: count - before[name] for name, count in after.items()}


def details(records: Sequence[Record]) -> dict[str, object]:
    """What became of each request, in lists under the names of `vllm bench serve`; times in seconds."""
    completed = {id(record) for record in records if record.error is None}
    return {
        "input_lens": [record.input_len for record in records],
        "output_lens": [record.output_len for record in records],
        "start_times": [record.sent for record in records],
        "ttfts": [serve_metrics.ttft(record) if id(record) in completed else None for record in records],
        "itls": [serve_metrics.itl(record) for record in records],
        "e2els": [serve_metrics.e2el(record) if id(record) in completed else None for record in records],
        "request_errors": [record.error for record in records],
    }
