"""Our client commands and a server whose certificate nobody has signed but itself."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import ThreadServer, running_server
from tokenyard.cli import run

TLS = Path(__file__).resolve().parent.parent.parent / "fixtures" / "tls"
CERT, KEY = TLS / "cert.pem", TLS / "key.pem"


@pytest.fixture(scope="module")
def secured(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    with running_server([f"server.ssl_certfile={CERT}", f"server.ssl_keyfile={KEY}"], model=tiny_llama_dir) as server:
        yield server


def url_of(server: ThreadServer) -> str:
    return server.url.replace("127.0.0.1", "localhost")


def commands(url: str, folder: Path) -> dict[str, list[str]]:
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": {"prompt": [5], "max_tokens": 2}}
    (folder / "in.jsonl").write_text(json.dumps(line) + "\n")
    batch = [str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl"), "--overwrite"]
    small = ["--num-prompts", "2", "--random-input-len", "4", "--random-output-len", "2", "bench.vocab_size=150"]
    return {
        "chat": ["chat", "--url", url, "--max-tokens", "2"],
        "run-batch": ["run-batch", *batch, "--url", url],
        "bench serve": ["bench", "serve", "--base-url", url, *small],
    }


@pytest.mark.parametrize("name", ["chat", "run-batch", "bench serve"])
def test_a_certificate_that_is_not_trusted_is_named_and_can_be_taken(
    secured: ThreadServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    name: str,
) -> None:
    url = url_of(secured)
    command = commands(url, tmp_path)[name]
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert run(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: the certificate of {url} is not trusted (self")
    assert "set SSL_CERT_FILE" in line
    assert "--insecure" in line
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    assert run([*command, "--insecure"]) == 0, capsys.readouterr().err


def test_the_variable_that_the_message_names_makes_it_trusted(secured: ThreadServer, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-c",
        "from tokenyard.cli import main; main()",
        *commands(url_of(secured), tmp_path)["chat"],
    ]
    done = subprocess.run(
        command,
        input="hi\n",
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "SSL_CERT_FILE": str(CERT)},
    )
    assert done.returncode == 0, done.stderr


def test_a_server_without_tls_is_told_as_that(server: ThreadServer, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "serve", "--base-url", server.url.replace("http:", "https:")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "cannot speak TLS with https://127.0.0.1" in line
