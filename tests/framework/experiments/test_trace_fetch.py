"""`tokenyard fetch-trace`: source and licence first, a size cap, a checksum, and a whole file or none."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from tokenyard.cli import fetch_trace, run
from tokenyard.errors import TokenyardError, UserError
from tokenyard.experiments.traces.fetch import fetch_trace as fetch
from tokenyard.experiments.traces.sources import FETCHABLE, Source
from trace_workloads import trace_requests

CONTENT = b"TIMESTAMP,ContextTokens,GeneratedTokens\n2024-05-10 00:00:00.009930+00:00,2162,5\n"
SHA256 = hashlib.sha256(CONTENT).hexdigest()


class _Handler(BaseHTTPRequestHandler):
    content = CONTENT
    claimed_bytes: int | None = None
    num_requests = 0

    def do_GET(self) -> None:
        type(self).num_requests += 1
        if self.path == "/missing":
            self.send_error(404)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(self.claimed_bytes or len(self.content)))
        self.end_headers()
        self.wfile.write(self.content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def served() -> Iterator[type[_Handler]]:
    """What the local server answers with; `url` is where."""

    class Handler(_Handler):
        url = ""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        Handler.url = f"http://127.0.0.1:{server.server_port}/trace"
        yield Handler
        server.shutdown()
        thread.join()


@pytest.fixture
def source(served: type[_Handler]) -> Source:
    return replace(FETCHABLE["azure2024_conv"], url=served.url, max_bytes=1000)  # type: ignore[attr-defined]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_trace_whose_checksum_is_known_is_checked_and_fetched_once(
    tmp_path: Path, source: Source, served: type[_Handler]
) -> None:
    known = replace(source, sha256=SHA256)
    first, second = fetch(known, tmp_path), fetch(known, tmp_path)
    assert first.path.read_bytes() == CONTENT
    assert (first.was_there, second.was_there, first.is_verified, served.num_requests) == (False, True, True, 1)
    assert names(tmp_path) == [source.file]


def test_another_checksum_than_the_known_one_leaves_nothing(tmp_path: Path, source: Source) -> None:
    with pytest.raises(TokenyardError, match=f"sha256 {SHA256}, not 00"):
        fetch(replace(source, sha256="00" * 32), tmp_path)
    assert names(tmp_path) == []


def test_an_unknown_checksum_is_recorded_and_must_stay(tmp_path: Path, source: Source, served: type[_Handler]) -> None:
    fetched = fetch(source, tmp_path)
    assert (fetched.sha256, fetched.is_verified) == (SHA256, False)
    assert names(tmp_path) == [source.file, f"{source.file}.sha256"]
    fetched.path.unlink()
    assert fetch(source, tmp_path).is_verified
    fetched.path.unlink()
    served.content = CONTENT + b"2024-05-10 00:00:01+00:00,1,1\n"
    with pytest.raises(TokenyardError, match="the one of the first fetch"):
        fetch(source, tmp_path)
    assert names(tmp_path) == [f"{source.file}.sha256"]


def test_a_file_that_was_changed_since_is_refused(tmp_path: Path, source: Source) -> None:
    fetch(source, tmp_path).path.write_text("other")
    with pytest.raises(UserError, match="remove it and fetch it again"):
        fetch(source, tmp_path)


def _too_large(served: type[_Handler]) -> str:
    served.content = b"x" * 2000
    return "larger than the 1000 bytes"


def _cut_off(served: type[_Handler]) -> str:
    served.claimed_bytes = len(CONTENT) + 5
    return "run the command again"


@pytest.mark.parametrize("fault", [_too_large, _cut_off])
def test_a_download_that_goes_wrong_leaves_nothing(
    tmp_path: Path, source: Source, served: type[_Handler], fault: Callable[[type[_Handler]], str]
) -> None:
    with pytest.raises(TokenyardError, match=fault(served)):
        fetch(source, tmp_path)
    assert names(tmp_path) == []


def test_a_server_that_refuses_and_one_that_is_not_there_are_told(tmp_path: Path, source: Source) -> None:
    with pytest.raises(TokenyardError, match="answered 404"):
        fetch(replace(source, url=source.url.replace("/trace", "/missing")), tmp_path)
    with pytest.raises(TokenyardError, match="cannot be fetched"):
        fetch(replace(source, url="http://127.0.0.1:1/"), tmp_path)
    with pytest.raises(UserError, match="only http and https"):
        fetch(replace(source, url="file:///etc/hostname"), tmp_path)
    assert names(tmp_path) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path, source: Source) -> None:
    def interrupt(count: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(source, tmp_path, interrupt)
    assert names(tmp_path) == []


def test_the_command_prints_source_and_licence_first_and_the_trace_can_be_used(
    tmp_path: Path, source: Source, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOKENYARD_CACHE", str(tmp_path))
    monkeypatch.setattr(fetch_trace, "FETCHABLE", {source.name: source})
    assert run(["fetch-trace", source.name]) == 0
    shown = capsys.readouterr()
    assert "CC-BY-4.0" in shown.err.splitlines()[0]
    assert f"source: {source.url}" in shown.err
    assert f"sha256 {SHA256}, which nobody has told us" in shown.out
    assert "workload.path=fetched:azure2024_conv" in shown.out
    assert [one.num_prompt_tokens for one in trace_requests("fetched:azure2024_conv")] == [2162]


def test_the_list_says_licence_size_and_what_is_not_known(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fetch-trace", "--list"]) == 0
    shown = capsys.readouterr().out
    assert {line for line in shown.splitlines() if not line.startswith(" ")} == set(FETCHABLE)
    assert shown.count("sha256 ") == len(FETCHABLE)
    assert "not known to us; the first fetch records it" in shown


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "say which trace"),
        (["azure2024_con"], "did you mean 'azure2024_conv'?"),
        (["burstgpt", "more"], "unexpected argument 'more'"),
        (["--list", "burstgpt"], "--list takes none"),
        (["burstgpt", "--to", ""], "--to is empty"),
    ],
)
def test_wrong_arguments_are_one_line(arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["fetch-trace", *arguments]) == 2
    assert why in capsys.readouterr().err
