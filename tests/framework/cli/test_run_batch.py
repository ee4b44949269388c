"""`tokenyard run-batch`: the same answers as a server gives, in the order of the lines."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from fake_openai import Asked, Reply, fake_server, models
from tokenyard import LLM, SamplingParams
from tokenyard.cli import run

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
ENGINE = ("kv_cache.num_blocks=64", "model.dtype=float32", "attention=torch_native")


def line(name: str, route: str, **body: Any) -> str:
    return json.dumps({"custom_id": name, "method": "POST", "url": route, "body": body})


def write(folder: Path, lines: Sequence[str]) -> tuple[str, ...]:
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return "run-batch", "-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")


def rows(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "out.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    return [json.loads(row) for row in text.splitlines()]


def test_lines_are_answered_as_a_server_would_in_their_order(
    tmp_path: Path, tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A14, F1: what is wrong in a line, an image to fetch among it, is a row; nothing else is touched."""
    model = str(tiny_llama_dir)
    image = [{"type": "image_url", "image_url": {"url": "http://127.0.0.1:9/x.png"}}]
    lines = [
        line("long", COMPLETIONS, model=model, prompt=[5, 6, 7], max_tokens=40, temperature=0, ignore_eos=True),
        "nonsense",
        line("short", COMPLETIONS, model=model, prompt=[[5, 6, 7], [9]], max_tokens=2, temperature=0, ignore_eos=True),
        line("chat", CHAT, model=model, messages=[{"role": "user", "content": "hi"}], max_tokens=3, seed=1),
        line("other", COMPLETIONS, model="gpt-9", prompt="x"),
        line("wrong", COMPLETIONS, model=model, prompt="x", temperature=-1),
        line("image", CHAT, model=model, messages=[{"role": "user", "content": image}]),
        line("stream", CHAT, model=model, messages=[], stream=True),
    ]
    assert run([*write(tmp_path, lines), "--json", model, *ENGINE]) == 1  # as rows have failed
    counts = json.loads(capsys.readouterr().out)
    assert (counts["completed"], counts["failed"]) == (3, 5)
    found = rows(tmp_path)
    names = ["long", None, "short", "chat", "other", "wrong", "image", "stream"]
    assert [row["custom_id"] for row in found] == names
    assert [row["response"] and row["response"]["status_code"] for row in found] == [
        200, None, 200, 200, 404, 400, 400, None,
    ]  # fmt: skip
    assert all((row["error"] is None) is (row["response"] is not None) for row in found)
    assert all(row["response"]["request_id"] for row in found if row["response"])
    long, short = found[0]["response"]["body"], found[2]["response"]["body"]
    with LLM(model, dtype="float32", overrides=["kv_cache.num_blocks=64", "attention=torch_native"]) as llm:
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        (expected,) = llm.generate([[5, 6, 7]], params, use_tqdm=False)
    assert long["choices"][0]["text"] == expected.outputs[0].text
    assert long["usage"]["completion_tokens"] == 40
    assert len(short["choices"]) == 2
    assert found[3]["response"]["body"]["object"] == "chat.completion"
    assert found[4]["response"]["body"]["error"]["type"] == "NotFoundError"


def test_a_served_name_stands_for_the_model(tmp_path: Path, tiny_llama_dir: Path) -> None:
    lines = [line("a", COMPLETIONS, model="gpt-9", prompt="x", max_tokens=1)]
    assert run([*write(tmp_path, lines), str(tiny_llama_dir), "server.served_model_name=[gpt-9]", *ENGINE]) == 0
    (row,) = rows(tmp_path)
    assert (row["response"]["status_code"], row["response"]["body"]["model"]) == (200, "gpt-9")


def test_a_server_can_answer_instead(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def answer(asked: Asked) -> Reply:
        return Reply({"echo": asked.body}, 200 if asked.body["model"] == "m" else 404, {"X-Request-Id": "r-1"})

    lines = [
        line("a", COMPLETIONS, model="m", prompt="x"),
        line("b", CHAT, model="n"),
        line("c", "http://127.0.0.1:9/v1/completions", model="m"),
    ]
    with fake_server(models=models("m"), completions=answer, chat=answer) as server:
        assert run([*write(tmp_path, lines), "--url", server.url + "/v1"]) == 1
        assert [asked.path for asked in server.asked] == ["/v1/models", COMPLETIONS, CHAT]  # F1: no other URL
    first, second, third = rows(tmp_path)
    assert first["response"] == {
        "status_code": 200,
        "request_id": "r-1",
        "body": {"echo": {"model": "m", "prompt": "x"}},
    }
    assert second["response"]["status_code"] == 404
    assert "url must be one of" in third["error"]["message"]
    assert "1 answered, 2 failed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["-i", "{}/none.jsonl"], "--input-file: there is no file"),
        (["-i", "{}/in.csv"], "--input-file takes a .jsonl file"),
        (["-i", "{}/in.parquet"], "--input-file takes a .jsonl file"),
        (["-i", "http://127.0.0.1:9/in.jsonl"], "is a URL; nothing is fetched"),
        (["-o", "s3://bucket/out.jsonl"], "is a URL; nothing is fetched"),
        (["-o", "{}/out.txt"], "--output-file takes a .jsonl file"),
        (["-o", "{}/none/out.jsonl"], "--output-file: there is no folder"),
        (["-o", "{}/in.jsonl"], "--output-file is the input file"),
        (["-o", "{}/in.jsonl", "--overwrite"], "--output-file is the input file"),
        (["-o", "{}/there.jsonl"], "exists; give another name, or --overwrite"),
        (["-o", "{}/folder.jsonl", "--overwrite"], "cannot be written"),
        (["--max-concurrency", "0"], "--max-concurrency takes 1 to"),
        (["--url", "http://127.0.0.1:9", "m"], "MODEL has no effect with --url: each line names its model"),
        (["--url", "http://127.0.0.1:9", "kv_cache.num_blocks=3"], "kv_cache.num_blocks=3 has no effect with --url"),
        (["--url", "127.0.0.1"], "--url takes the URL of a server"),
        (["--insecure"], "--insecure is for the TLS certificate of a server; give --url too"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_before_anything_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: list[str], said: str
) -> None:
    """A14: no other format is read."""
    command = write(tmp_path, ["{}"])
    (tmp_path / "there.jsonl").write_text("old\n")
    (tmp_path / "folder.jsonl").mkdir()
    assert run([*command, *(word.format(tmp_path) for word in change)]) == 2
    (text,) = capsys.readouterr().err.splitlines()
    assert said in text
    assert (tmp_path / "there.jsonl").read_text() == "old\n"
    assert not (tmp_path / "out.jsonl").exists()


def test_both_files_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["run-batch"]) == 2
    assert "--input-file is missing: tokenyard run-batch FILE.jsonl -o FILE.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("shape", ["{i} -o {o} {m}", "-o {o} {i} {m}", "{i} {m} -o {o}", "--model {m} {i} -o {o}"])
def test_the_input_may_be_the_first_word(tmp_path: Path, tiny_llama_dir: Path, shape: str) -> None:
    write(tmp_path, [line("a", COMPLETIONS, model=str(tiny_llama_dir), prompt="x", max_tokens=1)])
    words = {"i": tmp_path / "in.jsonl", "o": tmp_path / "out.jsonl", "m": tiny_llama_dir}
    assert run(["run-batch", *shape.format(**words).split(), *ENGINE]) == 0
    assert [row["custom_id"] for row in rows(tmp_path)] == ["a"]


def test_an_output_is_replaced_when_that_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl").write_text("old\n" * 1000)
    with fake_server(models=models("m"), completions=lambda asked: Reply({})) as server:
        command = write(tmp_path, [line("a", COMPLETIONS, model="m")])
        assert run([*command, "--url", server.url, "--overwrite"]) == 0
    assert [row["custom_id"] for row in rows(tmp_path)] == ["a"]


def test_a_server_that_is_not_there_is_told_once_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = write(tmp_path, [line(str(number), COMPLETIONS, model="m") for number in range(100)])
    assert run([*command, "--url", "http://127.0.0.1:9"]) == 1
    assert "error: cannot connect to http://127.0.0.1:9" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


def test_ctrl_c_leaves_whole_lines(tmp_path: Path, tiny_llama_dir: Path) -> None:
    model = str(tiny_llama_dir)
    lines = [
        line(str(number), COMPLETIONS, model=model, prompt=[5], max_tokens=200, ignore_eos=True)
        for number in range(2000)
    ]
    command = [sys.executable, "-c", "from tokenyard.cli import main; main()", *write(tmp_path, lines), model, *ENGINE]
    process = subprocess.Popen(
        command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        target, deadline = tmp_path / "out.jsonl", time.monotonic() + 120
        while not (target.exists() and target.stat().st_size):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    assert err.decode().splitlines()[-1] == "interrupted"
    found = rows(tmp_path)
    assert [row["custom_id"] for row in found] == [str(number) for number in range(len(found))]
    assert len(found) < 2000
