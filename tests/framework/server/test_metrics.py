"""GET /metrics: vLLM's names and meanings, and totals that are what clients saw."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import openai
import pytest
from http_server import ThreadServer, running_server
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families

MODEL = "tiny"

NAMES = {
    "gauge": (
        "num_requests_running",
        "num_requests_waiting",
        "num_requests_waiting_by_reason",
        "kv_cache_usage_perc",
        "cache_config_info",
    ),
    "counter": (
        "prefix_cache_queries",
        "prefix_cache_hits",
        "num_preemptions",
        "prompt_tokens",
        "prompt_tokens_by_source",
        "prompt_tokens_cached",
        "generation_tokens",
        "request_success",
        "admission_rejections",
    ),
    "histogram": (
        "request_prompt_tokens",
        "request_generation_tokens",
        "iteration_tokens_total",
        "request_max_num_generation_tokens",
        "request_params_n",
        "request_params_max_tokens",
        "time_to_first_token_seconds",
        "inter_token_latency_seconds",
        "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds",
        "request_queue_time_seconds",
        "request_inference_time_seconds",
        "request_prefill_time_seconds",
        "request_decode_time_seconds",
        "request_prefill_kv_computed_tokens",
    ),
}
OLD_NAMES = (
    "gpu_cache_usage_perc",
    "gpu_prefix_cache_queries",
    "gpu_prefix_cache_hits",
    "time_per_output_token_seconds",
)


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    overrides = (
        "server.served_model_name=[tiny]",
        "kv_cache.block_size=4",
        "scheduler=priority",
        "scheduler.max_num_seqs=4",
        "plugins.budget_us=1e9",
    )
    with running_server(overrides, model=tiny_llama_dir) as running:
        yield running


class Numbers:
    """One scrape: `numbers["generation_tokens_total"]`, with labels `numbers["request_success_total", "stop"]`."""

    def __init__(self, server: ThreadServer, prefix: str = "tokenyard:") -> None:
        status, self.text = server.get("/metrics")
        assert status == 200
        self.families = {family.name: family for family in text_string_to_metric_families(self.text)}
        self._values: dict[tuple[str, ...], float] = {}
        for family in self.families.values():
            for sample in family.samples:
                own = [value for name, value in sample.labels.items() if name not in ("model_name", "engine")]
                self._values[(sample.name.removeprefix(prefix), *own)] = sample.value

    def __getitem__(self, key: str | tuple[str, ...]) -> float:
        return self._values.get((key,) if isinstance(key, str) else key, 0.0)


def complete(server: ThreadServer, prompt: list[int], **more: object) -> openai.types.Completion:
    body = {"temperature": 0, **more}
    return server.client.completions.create(model=MODEL, prompt=prompt, **body)  # type: ignore[no-any-return,call-overload]


def test_every_metric_stands_under_our_name_and_vllms_with_its_labels(server: ThreadServer) -> None:
    complete(server, [5, 6, 7], max_tokens=3)
    families = Numbers(server).families
    for kind, names in NAMES.items():
        for prefix in ("tokenyard:", "vllm:"):
            for name in names:
                family = families[prefix + name]
                assert family.type == kind, name
                for sample in family.samples:
                    assert sample.labels["engine"] == "0"
                    assert sample.labels["model_name"] == MODEL
    assert {f"vllm:{name}" for name in OLD_NAMES} <= set(families)
    assert {sample.labels["reason"] for sample in families["vllm:num_requests_waiting_by_reason"].samples} == {
        "capacity",
        "deferred",
    }
    (info,) = families["tokenyard:cache_config_info"].samples
    assert (info.labels["block_size"], info.labels["num_gpu_blocks"]) == ("4", "256")


def test_histograms_have_the_buckets_that_dashboards_ask_for(server: ThreadServer) -> None:
    complete(server, [5, 6, 7], max_tokens=3)
    families = Numbers(server).families

    def bounds(name: str) -> list[float]:
        samples = families[f"vllm:{name}"].samples
        return [float(sample.labels["le"]) for sample in samples if sample.name.endswith("_bucket")]

    assert bounds("time_to_first_token_seconds")[:4] == [0.001, 0.005, 0.01, 0.02]
    assert bounds("time_to_first_token_seconds")[-3:] == [640, 2560, float("inf")]
    assert bounds("inter_token_latency_seconds")[:3] == [0.01, 0.025, 0.05]
    assert bounds("e2e_request_latency_seconds")[-2:] == [7680, float("inf")]
    assert bounds("iteration_tokens_total")[:3] == [1, 8, 16]
    assert bounds("iteration_tokens_total")[-2] == 16384
    lengths = bounds("request_prompt_tokens")
    assert lengths[:5] == [1, 2, 5, 10, 20]
    assert lengths[-2] <= server.llm.model_config.max_model_len < lengths[-2] * 2.6


def test_plugins_are_told_by_kind_name_and_point_with_the_steps_that_they_are_a_part_of(server: ThreadServer) -> None:
    before = Numbers(server)
    complete(server, [5, 6, 7], max_tokens=20)
    server.wait_until_idle()
    after = Numbers(server)
    key, lookup = ("policy", "priority", "waiting_key"), ("kv_cache", "paged", "lookup")
    assert after["plugin_calls_total", *key] - before["plugin_calls_total", *key] == 1
    assert after["plugin_calls_total", *lookup] > before["plugin_calls_total", *lookup]
    assert after["plugin_seconds_total", *key] > before["plugin_seconds_total", *key]
    assert after["step_seconds_total"] > before["step_seconds_total"]
    told = [after[name] for name in ("plugin_budget_exceeded_total",) if f"tokenyard:{name}" in after.text]
    assert told == [0]
    assert "vllm:plugin_seconds" not in after.text


def test_openmetrics_is_told_to_those_that_ask_for_it(server: ThreadServer) -> None:
    status, text = server.get("/metrics", {"Accept": "application/openmetrics-text; version=1.0.0"})
    assert status == 200
    families = parse_openmetrics(text)  # type: ignore[no-untyped-call]
    assert any(family.name == "tokenyard:generation_tokens" for family in families)


def test_tokens_of_metrics_are_those_of_usage(server: ThreadServer) -> None:
    before = Numbers(server)
    answers = [complete(server, list(range(10, 10 + length)), max_tokens=length) for length in (3, 9, 9, 17)]
    answers.append(complete(server, [50, 51, 52, 53, 54], max_tokens=4, n=3, temperature=1.0, seed=1))
    after = Numbers(server)
    usages = [answer.usage for answer in answers if answer.usage is not None]
    assert after["prompt_tokens_total"] - before["prompt_tokens_total"] == sum(one.prompt_tokens for one in usages)
    generated = sum(one.completion_tokens for one in usages)
    assert after["generation_tokens_total"] - before["generation_tokens_total"] == generated
    assert after["request_success_total", "length"] - before["request_success_total", "length"] == 7
    for name, count in (("e2e_request_latency_seconds_count", 5), ("request_generation_tokens_count", 7)):
        assert after[name] - before[name] == count
    cached = sum(one.prompt_tokens_details.cached_tokens or 0 for one in usages if one.prompt_tokens_details)
    assert cached > 0
    assert after["prompt_tokens_cached_total"] - before["prompt_tokens_cached_total"] == cached


def test_aborted_and_refused_requests_are_counted(server: ThreadServer) -> None:
    before = Numbers(server)
    with server.client.completions.create(model=MODEL, prompt=[7, 8, 9], max_tokens=100, stream=True) as stream:
        next(iter(stream))
    server.wait_until_idle()
    after = Numbers(server)
    assert after["request_success_total", "abort"] - before["request_success_total", "abort"] == 1
    assert after["num_requests_running"] == after["num_requests_waiting"] == after["kv_cache_usage_perc"] == 0


def test_http_requests_are_counted_by_route_and_not_by_what_clients_make_up(server: ThreadServer) -> None:
    for number in range(3):
        server.get(f"/no/such/path/{number}")
        server.get(f"/debug/requests/{number}")
    numbers = Numbers(server)
    assert numbers["http_requests_total", "none", "GET", "4xx"] >= 3
    assert numbers["http_requests_total", "/debug/requests/{request_id}", "GET", "4xx"] >= 3
    assert numbers["http_requests_total", "/v1/completions", "POST", "2xx"] >= 1
    assert "/no/such/path" not in numbers.text
    assert "process_cpu_seconds_total" in numbers.families or numbers["process_cpu_seconds_total"] > 0


async def _run_all(server: ThreadServer, requests: list[dict[str, object]]) -> list[dict[str, int]]:
    """What each client saw: tokens and finish reasons; `leave` closes the connection after so many events."""

    async def run(session: aiohttp.ClientSession, given: dict[str, object]) -> dict[str, int]:
        leave = given.pop("leave")
        body = {"model": MODEL, "stream": True, "stream_options": {"include_usage": True}, **given}
        seen = {"prompt": 0, "generated": 0, "ends": 0, "left": 0}
        async with session.post(f"{server.url}/v1/completions", json=body) as answer:
            assert answer.status == 200, await answer.text()
            number = 0
            async for line in answer.content:
                if not line.startswith(b"data: {"):
                    continue
                event = json.loads(line[6:])
                seen["ends"] += sum(choice["finish_reason"] is not None for choice in event["choices"])
                if usage := event.get("usage"):
                    seen["prompt"], seen["generated"] = usage["prompt_tokens"], usage["completion_tokens"]
                number += 1
                if number == leave:
                    seen["left"] = 1
                    break
        return seen

    async with aiohttp.ClientSession() as session:
        return list(await asyncio.gather(*(run(session, dict(request)) for request in requests)))


REQUEST = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(5, 60), min_size=1, max_size=12),
        "max_tokens": st.integers(1, 24),
        "n": st.integers(1, 3),
        "temperature": st.just(1.0),
        "seed": st.integers(0, 3),
        "stop": st.sampled_from([None, "e", ["a", "t"]]),
        "leave": st.sampled_from([None, None, 1, 3]),
    }
)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(REQUEST, min_size=1, max_size=8))
def test_totals_are_what_clients_saw_whatever_they_do(server: ThreadServer, requests: list[dict[str, object]]) -> None:
    """Aborts, several choices, stop strings. One that leaves may not see its last tokens: for it there are bounds."""
    server.wait_until_idle()
    before = Numbers(server)
    seen = asyncio.run(_run_all(server, requests))
    server.wait_until_idle()
    after = Numbers(server)

    def grown(*key: str) -> float:
        return after[key] - before[key]

    stayed = [one for one in seen if not one["left"]]
    left = [request for request, one in zip(requests, seen, strict=True) if one["left"]]
    most_unseen = sum(int(str(request["max_tokens"])) * int(str(request["n"])) for request in left)
    generated = grown("generation_tokens_total")
    assert 0 <= generated - sum(one["generated"] for one in stayed) <= most_unseen
    prompts = sum(one["prompt"] for one in stayed)
    assert (
        prompts <= grown("prompt_tokens_total") <= sum(len(str(request["prompt"]).split(",")) for request in requests)
    )
    ends = sum(grown("request_success_total", reason) for reason in ("stop", "length", "abort", "error"))
    assert ends == sum(int(str(request["n"])) for request in requests)
    assert grown("request_success_total", "error") == 0
    assert grown("request_success_total", "abort") <= sum(int(str(request["n"])) for request in left)
    assert grown("e2e_request_latency_seconds_count") == len(requests)
    assert grown("request_params_n_sum") == ends
    assert grown("request_generation_tokens_sum") == generated
    assert after["num_requests_running"] == after["num_requests_waiting"] == 0
