"""`tokenyard chat --url`: any server of OpenAI's API, and no model here."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from fake_openai import DONE, Asked, FakeServer, Reply, Stream, chat_chunk, chunk, event, fake_server, models
from tokenyard.cli import run

CHAT = "/v1/chat/completions"


def says(*pieces: str, finish: str = "stop") -> Stream:
    return Stream([chat_chunk(""), *map(chat_chunk, pieces), chat_chunk(finish=finish), DONE])


def echo(asked: Asked) -> Stream:
    return says("you said ", asked.body["messages"][-1]["content"])


@pytest.fixture(autouse=True)
def _no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TOKENYARD_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)


def talk(monkeypatch: pytest.MonkeyPatch, url: str, lines: str, *arguments: str) -> int:
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    return run(["chat", "--url", url, *arguments])


def conversations(server: FakeServer) -> list[list[tuple[str, str]]]:
    """The messages of each request."""
    return [[(one["role"], one["content"]) for one in asked.body["messages"]] for asked in server.of(CHAT)]


def test_each_answer_is_given_every_turn_before_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with fake_server(models=models("m"), chat=echo) as server:
        assert talk(monkeypatch, f"{server.url}/v1/", "hi\n\n  you \n/reset\nagain\n/exit\nno\n", "--system", "S") == 0
    system = ("system", "S")
    assert conversations(server) == [
        [system, ("user", "hi")],
        [system, ("user", "hi"), ("assistant", "you said hi"), ("user", "you")],
        [system, ("user", "again")],
    ]
    assert capsys.readouterr().out == "you said hi\nyou said you\nyou said again\n"


def test_only_what_was_given_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    with fake_server(models=models("m", "n"), chat=echo) as server:
        flags = ("--temperature", "0", "--stop", "x", "--max-tokens", "9", "--ignore-eos")
        assert talk(monkeypatch, server.url, "hi\n", "n", *flags) == 0
        assert talk(monkeypatch, server.url, "hi\n", "--model", "n") == 0
        assert talk(monkeypatch, server.url, "hi\n") == 0
    first, second, third = (asked.body for asked in server.of(CHAT))
    messages = [{"role": "user", "content": "hi"}]
    assert first == {
        "model": "n",
        "stream": True,
        "messages": messages,
        "temperature": 0.0,
        "stop": ["x"],
        "max_tokens": 9,
        "ignore_eos": True,
    }
    assert second == {"model": "n", "stream": True, "messages": messages, "max_tokens": 256}
    assert third["model"] == "m"


@pytest.mark.parametrize("name", ["TOKENYARD_API_KEY", "OPENAI_API_KEY"])
def test_the_key_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, "k1")
    with fake_server(models=models("m"), chat=echo) as server:
        assert talk(monkeypatch, server.url, "hi\n") == 0
    assert {asked.headers["Authorization"] for asked in server.asked} == {"Bearer k1"}


def test_raw_completes_each_message_alone(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def complete(asked: Asked) -> Stream:
        return Stream([chunk(" there"), chunk("", finish="length"), DONE])

    with fake_server(models=models("m"), completions=complete) as server:
        assert talk(monkeypatch, server.url, "hi\nho\n", "--raw") == 0
    assert [asked.body["prompt"] for asked in server.of("/v1/completions")] == ["hi", "ho"]
    captured = capsys.readouterr()
    assert captured.out == " there\n there\n"
    assert captured.err.count("(cut: --max-tokens allows more)") == 2


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (Reply({"error": {"message": "the prompt has 9 tokens"}}, 400), "answered 400: the prompt has 9 tokens"),
        (Reply({"error": {"message": "no model m"}}, 404), "answered 404: no model m"),
        (Stream([chat_chunk("a"), event({"error": {"message": "died"}}), DONE]), "middle of an answer: died"),
        (Stream([chat_chunk("a"), None]), "broke off in the middle of an answer"),
    ],
    ids=["400", "404", "error event", "hangs up"],
)
def test_a_turn_that_fails_is_one_line_and_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reply: Reply | Stream, said: str
) -> None:
    replies: Any = iter([says("one"), reply, says("three")])
    with fake_server(models=models("m"), chat=lambda asked: next(replies)) as server:
        assert talk(monkeypatch, server.url, "1\n2\n3\n") == 1
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert captured.out.endswith("three\n")
    assert conversations(server)[2] == [("user", "1"), ("assistant", "one"), ("user", "3")]


def test_ctrl_c_ends_the_answer_and_not_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main = os.getpid()
    rest: list[Any] = [0.02, chat_chunk("z")] * 1500
    endless = Stream([chat_chunk("begun"), 0.2, lambda: os.kill(main, signal.SIGINT), *rest])
    replies: Any = iter([endless, says("next")])
    with fake_server(models=models("m"), chat=lambda asked: next(replies)) as server:
        assert talk(monkeypatch, server.url, "1\n2\n") == 0
    out = capsys.readouterr().out
    assert out.startswith("begun")
    assert out.endswith("\nnext\n")
    assert server.num_aborted == 1
    messages = conversations(server)[1]
    assert messages[0] == ("user", "1")
    assert messages[1][1].startswith("begun")  # what came is part of the conversation
    assert messages[2] == ("user", "2")


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["kv_cache.block_size=4"], 2, "kv_cache.block_size=4 is for an engine, and with --url the server has one"),
        (["--max-num-seqs", "4"], 2, "--max-num-seqs is for an engine"),
        (["--config", "x.yaml"], 2, "--config is for an engine"),
        (["m", "n"], 2, "more than one model is given: m, n"),
        (["m", "--model", "n"], 2, "more than one model"),
        (["other"], 2, "has no model 'other'; there is: m"),
        (["--raw", "--system", "S"], 2, "--system needs the chat template"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_before_anything_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, said: str
) -> None:
    with fake_server(models=models("m"), chat=echo) as server:
        assert talk(monkeypatch, server.url, "hi\n", *arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert server.of(CHAT) == []


def test_a_server_that_cannot_be_used_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert talk(monkeypatch, "http://127.0.0.1:9", "hi\n") == 1
    assert "error: cannot connect to http://127.0.0.1:9: Connection refused" in capsys.readouterr().err
    with fake_server(models=lambda asked: Reply({"error": {"message": "no"}}, 401)) as server:
        assert talk(monkeypatch, server.url, "hi\n") == 2
    assert "refused the API key (401: no); set TOKENYARD_API_KEY" in capsys.readouterr().err
    assert talk(monkeypatch, "127.0.0.1:9", "hi\n") == 2
    assert "--url takes the URL of a server" in capsys.readouterr().err


def test_no_model_library_is_loaded() -> None:
    code = (
        "import sys\nfrom tokenyard.cli import run\nrun(['chat', '--url', 'http://127.0.0.1:9'])\n"
        "sys.exit(10 * bool({'torch', 'transformers', 'fastapi', 'pydantic'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, input="hi\n")
    assert done.returncode == 0, done.stderr
