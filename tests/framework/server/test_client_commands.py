"""Our own client commands against our own server: what both sides count is the same."""

from __future__ import annotations

import io
import json

import pytest
from bench_command import json_of
from http_server import ThreadServer
from tokenyard.cli import run

SMALL = ("--num-prompts", "12", "--random-input-len", "20", "--random-output-len", "9", "bench.vocab_size=150")


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--ignore-eos",),
        ("--ignore-eos", "--max-concurrency", "3", "--random-range-ratio", "0.5"),
        ("--ignore-eos", "--request-rate", "200", "--burstiness", "0.5"),
        ("--ignore-eos", "bench.prompts=text"),
        ("--ignore-eos", "--backend", "openai-chat"),
        ("bench.check_deltas=true",),
    ],
    ids=" ".join,
)
def test_totals_of_bench_serve_are_those_that_the_server_counts(
    server: ThreadServer, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    row = json_of(capsys, "serve", "--base-url", server.url, *SMALL, *flags)
    assert (row["completed"], row["failed"], row["errors"]) == (12, 0, {})
    assert [name for name in row if name.startswith("num_wrong") and row[name]] == []
    assert row["num_without_usage"] == 0
    assert row["server_counted"] == {
        "prompt_tokens": row["total_input_tokens"],
        "generation_tokens": row["total_output_tokens"],
        "requests": 12,
    }
    assert isinstance(row["server_version"], str)
    if flags == ("--ignore-eos",):
        assert (row["total_input_tokens"], row["total_output_tokens"]) == (12 * 20, 12 * 9)


def test_a_chat_with_the_server_is_answered(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nagain\n"))
    flags = ("--max-tokens", "5", "--ignore-eos", "--temperature", "0", "--top-k", "3")
    assert run(["chat", "--url", server.url, *flags]) == 0
    captured = capsys.readouterr()
    (name,) = server.service.model_names
    answer = server.client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": "hi"}],
        temperature=0,
        max_tokens=5,
        extra_body={"ignore_eos": True},
    )
    assert captured.out.startswith(f"{answer.choices[0].message.content}\n")
    assert captured.err.count("(cut: --max-tokens allows more)") == 2


def test_a_batch_asked_of_the_server_is_answered(
    server: ThreadServer, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("batch")
    lines = [
        {"custom_id": f"{number}", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5], "n": 2, **more}}
        for number, more in enumerate([{}, {"temperature": 9}, {"max_tokens": 3}])
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    files = ("-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"))
    assert run(["run-batch", *files, "--url", server.url]) == 1  # as one request has failed
    rows = [json.loads(row) for row in (folder / "out.jsonl").read_text().splitlines()]
    assert [row["custom_id"] for row in rows] == ["0", "1", "2"]
    assert [row["response"]["status_code"] for row in rows] == [200, 400, 200]
    assert all(len(row["response"]["request_id"]) == 32 for row in rows)
