"""`tokenyard bench serve`: what is sent, what is told, and every mistake in one line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from bench_command import json_of, output_of, refused
from fake_openai import DONE, Asked, FakeServer, Reply, Stream, chat_chunk, chunk, fake_server, models, usage
from tokenyard.cli import run


def completion(asked: Asked) -> Stream:
    """As many chunks as tokens are asked for."""
    count, ids = asked.body["max_tokens"], asked.body.get("return_token_ids", False)
    parts = [chunk("x", ids=[7] if ids else None) for _ in range(count - 1)]
    last = chunk("x", finish="length", ids=[7] if ids else None)
    return Stream([*parts, last, usage(len(asked.body["prompt"]), count), DONE])


def chat(asked: Asked) -> Stream:
    count = asked.body["max_completion_tokens"]
    parts = [chat_chunk(""), *[chat_chunk("x")] * count, chat_chunk(finish="length")]
    return Stream([*parts, usage(9, count), DONE])


SMALL = ("--num-prompts", "5", "--random-input-len", "6", "--random-output-len", "4", "--ignore-eos")


def at(server: FakeServer, *flags: str) -> tuple[str, ...]:
    return "serve", "--base-url", server.url, *SMALL, *flags


def test_totals_are_those_of_the_requests_and_nothing_is_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(models=models("m"), completions=completion, version=lambda _: Reply({"version": "1.2"})) as server:
        row = json_of(capsys, *at(server))
    assert (row["completed"], row["failed"], row["total_input_tokens"], row["total_output_tokens"]) == (5, 0, 30, 20)
    assert [row[name] for name in row if name.startswith("num_wrong") or name == "num_without_usage"] == [0] * 4
    assert (row["model_id"], row["server_version"], row["server_counted"], row["loop"]) == ("m", "1.2", None, "open")
    assert row["num_chunks"] == 5 * 5
    names = {"mean", "median", "std", "max", "p50", "p90", "p99"}
    assert {f"{name}_{metric}_ms" for name in names for metric in ("ttft", "tpot", "itl", "e2el")} <= set(row)
    assert {"client_cpu_s", "client_us_per_chunk", "max_late_ms", "python", "load", "duration"} <= set(row)
    assert float(str(row["client_cpu_s"])) > 0


def test_what_is_sent_is_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--extra-body", '{"top_k": 3}', "--header", "X-A=1", "X-B=2", "--temperature", "0.5", "--seed", "3")
    with fake_server(models=models("m", "n"), completions=completion) as server:
        json_of(capsys, *at(server, "--model", "n", *flags))
        json_of(capsys, *at(server, "--model", "n", *flags))
    first, second = (server.of("/v1/completions")[begin : begin + 6] for begin in (0, 6))  # one of them warms up
    assert [one.body for one in first[1:]] == [one.body for one in second[1:]]
    body = first[1].body
    prompt = body.pop("prompt")
    assert len(prompt) == 6
    assert all(isinstance(token, int) and 100 <= token < 32_000 for token in prompt)
    assert body == {
        "model": "n",
        "max_tokens": 4,
        "temperature": 0.5,
        "ignore_eos": True,
        "top_k": 3,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert (first[1].headers["X-A"], first[1].headers["X-B"]) == ("1", "2")
    prompts = [tuple(one.body.get("prompt", prompt)) for one in first]
    assert len(set(prompts)) == 6  # none whose K/V a prefix cache has


def test_chats_are_text_that_the_server_writes(capsys: pytest.CaptureFixture[str]) -> None:
    written = {"prompt": "some words"}
    with fake_server(models=models("m"), chat=chat, detokenize=lambda asked: Reply(written)) as server:
        row = json_of(capsys, *at(server, "--backend", "openai-chat"))
    assert (row["completed"], row["total_output_tokens"], row["total_input_tokens"]) == (5, 20, 45)
    assert row["num_wrong_input_len"] == 0  # a template adds tokens
    body = server.of("/v1/chat/completions")[-1].body
    assert body["messages"] == [{"role": "user", "content": "some words"}]
    assert len(server.of("/detokenize")) == 6


def test_chats_need_somebody_who_writes(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(models=models("m"), chat=chat) as server:
        line = refused(capsys, "bench", *at(server, "--backend", "openai-chat"))
    assert "prompts cannot be written as text" in line
    assert "give --tokenizer MODEL" in line


def test_a_local_tokenizer_writes_prompts_of_about_as_many_tokens(
    capsys: pytest.CaptureFixture[str], tiny_llama_dir: Path
) -> None:
    with fake_server(models=models("m"), completions=completion) as server:
        row = json_of(capsys, *at(server, "--tokenizer", str(tiny_llama_dir)))
    assert row["prompts"] == "text"
    assert all(isinstance(one.body["prompt"], str) for one in server.of("/v1/completions"))


def test_chunks_may_be_checked_against_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    def lies(asked: Asked) -> Stream:
        return Stream([chunk("x", ids=[1, 2]), chunk("x", ids=[3, 4], finish="length"), usage(6, 5), DONE])

    with fake_server(models=models("m"), completions=completion) as server:
        assert json_of(capsys, *at(server, "bench.check_deltas=true"))["num_wrong_deltas"] == 0
        assert server.of("/v1/completions")[-1].body["return_token_ids"] is True
        server.routes["/v1/completions"] = lies
        _, err = output_of(capsys, *at(server))
    assert "5 of 5 answers have a usage that contradicts their chunks" in err
    assert "5 of 5 answers have another number of tokens than they asked for" in err


def test_failures_are_counted_and_shown_with_their_reason(capsys: pytest.CaptureFixture[str]) -> None:
    asked_before: list[Asked] = []

    def sometimes(asked: Asked) -> Stream | Reply:
        asked_before.append(asked)
        return Reply({"error": {"message": "busy"}}, 503) if len(asked_before) in (3, 5) else completion(asked)

    with fake_server(models=models("m"), completions=sometimes) as server:
        assert run(["bench", *at(server, "--max-concurrency", "1")]) == 1
    out, err = capsys.readouterr()
    assert "3 completed, 2 failed" in out
    assert err == f"error: 2 of 5 requests failed: {server.url} answered 503: busy\n"


def test_when_nothing_works_that_is_the_error(capsys: pytest.CaptureFixture[str]) -> None:
    asked_before: list[Asked] = []

    def only_the_first(asked: Asked) -> Stream | Reply:
        asked_before.append(asked)
        return completion(asked) if len(asked_before) == 1 else Reply({"error": {"message": "busy"}}, 503)

    with fake_server(models=models("m"), completions=only_the_first) as server:
        assert run(["bench", *at(server)]) == 1
        assert f"none of 5 requests succeeded; 5 of them: {server.url} answered 503: busy" in capsys.readouterr().err
        server.routes["/v1/completions"] = lambda asked: Reply({"error": {"message": "no such token"}}, 400)
        assert run(["bench", *at(server)]) == 1
        assert "the first request, which warms up, failed" in capsys.readouterr().err


def test_people_get_totals_a_table_and_the_facts(capsys: pytest.CaptureFixture[str]) -> None:
    counted = {"prompt_tokens": 0, "generation_tokens": 0, "request_success": 0}

    def counts(asked: Asked) -> Stream:
        counted["prompt_tokens"] += len(asked.body["prompt"])
        counted["generation_tokens"] += asked.body["max_tokens"]
        counted["request_success"] += 1
        return completion(asked)

    def metrics(asked: Asked) -> Reply:
        lines = [f"# TYPE vllm:{name} counter\nvllm:{name}_total {count}.0\n" for name, count in counted.items()]
        return Reply("".join(lines))

    flags = ("--percentile-metrics", "ttft,e2el", "--metric-percentiles", "50,95", "--goodput", "ttft:1e6", "tpot:1e6")
    with fake_server(models=models("m"), completions=counts, metrics=metrics) as server:
        out, err = output_of(capsys, *at(server, "--request-rate", "1000", *flags))
    assert "5 completed, 0 failed" in out
    assert "good share of all      1.0000" in out
    header = next(line for line in out.splitlines() if line.startswith("ms "))
    assert header.split() == ["ms", "mean", "median", "std", "p95", "max"]
    assert "TTFT, time to first token" in out
    assert "E2EL, end-to-end latency" in out
    assert "ITL" not in out
    assert "it counted 30 prompt tokens, 20 generation tokens, 5 requests meanwhile" in out
    assert "open loop, request rate 1000.0, burstiness 1.0" in out
    assert "this client took" in out
    assert err == ""


@pytest.mark.parametrize("flag", ["--save-result", "--save-detailed"])
def test_the_result_is_written_to_a_file(capsys: pytest.CaptureFixture[str], tmp_path: Path, flag: str) -> None:
    place = ("--result-dir", str(tmp_path), "--result-filename", "r.json")
    with fake_server(models=models("m"), completions=completion) as server:
        out, err = output_of(capsys, *at(server, "--json", flag, *place))
    row: Mapping[str, Any] = json.loads(out)
    written = json.loads((tmp_path / "r.json").read_text())
    assert {name: written[name] for name in row} == row
    assert "date" in written
    assert ("ttfts" in written) is (flag == "--save-detailed")
    if flag == "--save-detailed":
        assert written["output_lens"] == [4] * 5
        assert [len(gaps) for gaps in written["itls"]] == [3] * 5
        assert written["request_errors"] == [None] * 5
    assert "r.json" in err


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--base-url", "localhost:8000"], ["--base-url takes the URL of a server", "got 'localhost:8000'"]),
        (["--request-rate", "0"], ["bench.request_rate", "above 0, or inf", "got 0"]),
        (["--request-rate", "fast"], ["bench.request_rate", "'fast'"]),
        (["--request-rate", "nan"], ["bench.request_rate"]),
        (["--burstiness", "-1"], ["bench.burstiness", "got -1"]),
        (["--random-range-ratio", "1"], ["bench.random_range_ratio", "below 1"]),
        (["--num-prompts", "0"], ["bench.num_prompts", "got 0"]),
        (["--max-concurrency", "0"], ["bench.max_concurrency"]),
        (["--backend", "vllm"], ["bench.backend", "'openai', 'openai-chat'", "'vllm'"]),
        (["--dataset-name", "sharegpt"], ["bench.dataset_name", "'random'"]),
        (["--dataset-path", "x.json"], ["--dataset-path is not available", "--dataset-name random"]),
        (["--goodput", "ttft=500"], ["bench.goodput", "METRIC:MILLISECONDS", "ttft, tpot, e2el"]),
        (["--goodput", "itl:5"], ["bench.goodput", "'itl:5'"]),
        (["--percentile-metrics", "ttft,foo"], ["bench.percentile_metrics", "'foo'", "ttft, tpot, itl, e2el"]),
        (["--metric-percentiles", "50,101"], ["bench.metric_percentiles", "0 to 100"]),
        (["--header", "nonsense"], ["bench.header", "NAME=VALUE"]),
        (["--extra-body", "[1]"], ["bench.extra_body", "a mapping"]),
        (["--endpoint", "v1/x"], ["bench.endpoint", "a path such as /v1/completions"]),
        (["--backend", "openai-chat", "bench.prompts=token_ids"], ["bench.prompts", "text with bench.backend"]),
        (["bench.prompts=token_ids", "--tokenizer", "m"], ["bench.tokenizer"]),
        (["--port", "70000"], ["bench.port", "65535"]),
        (["--top-p", "0.5"], ["--extra-body '{\"top_p\": ...}'"]),
        (["--ramp-up-strategy", "linear"], ["--ramp-up-strategy is not available"]),
        (["--no-such-flag"], ["unknown flag --no-such-flag"]),
        (["--num-prompt", "3"], ["unknown flag --num-prompt", "--num-prompts"]),
        (["scheduler=fcfs"], ["'scheduler=fcfs' is for an engine", "tokenyard serve"]),
        (["http://127.0.0.1:8000"], ["--base-url http://127.0.0.1:8000"]),
        (["m", "n"], ["unexpected argument 'n'"]),
        (["bench.foo=1"], ["unknown key 'bench.foo'"]),
        (["--result-filename", "x"], ["needs --save-result"]),
        (["--save-result", "--result-dir", "/no/such"], ["no folder /no/such"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_before_anything_is_sent(
    capsys: pytest.CaptureFixture[str], arguments: list[str], parts: list[str]
) -> None:
    line = refused(capsys, "bench", "serve", *arguments)
    for part in parts:
        assert part in line


def test_keys_and_flags_say_the_same_and_the_later_key_wins(capsys: pytest.CaptureFixture[str]) -> None:
    with fake_server(models=models("m"), completions=completion) as server:
        row = json_of(capsys, *at(server, "bench.num_prompts=2", "bench.request_rate=inf", "m"))
        assert (row["num_prompts"], row["model_id"], row["request_rate"]) == (2, "m", "inf")
        line = refused(capsys, "bench", *at(server, "other"))
    assert "has no model 'other'; there is: m" in line


def test_a_flag_of_an_engine_is_not_suggested(capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(capsys, "bench", "serve", "--max-num-seq", "3")
    assert "unknown flag --max-num-seq" in line
    assert "--max-num-seqs" not in line


def test_a_server_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "--port", "9"]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith("error: cannot connect to http://127.0.0.1:9: Connection refused")
    assert len(captured.err.splitlines()) == 1
