"""Below and beside requests: HEAD, what is no HTTP, connections that break, endpoints that are not there."""

from __future__ import annotations

import http.client
import json
import logging
import socket
import struct
import time

import pytest
from http_server import ThreadServer, wait_for
from tokenyard.server.transport import RareLine

GETS = ("/livez", "/readyz", "/health", "/startupz", "/version", "/v1/models", "/metrics", "/openapi.json")


def connected(server: ThreadServer) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


def said(server: ThreadServer, sent: bytes) -> bytes:
    """All that is answered until the connection is closed."""
    with connected(server) as connection:
        connection.sendall(sent)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def asked(server: ThreadServer, method: str, path: str, body: object = None) -> tuple[int, bytes, dict[str, str]]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, answer.read(), dict(answer.headers)
    finally:
        connection.close()


@pytest.mark.parametrize("path", GETS)
def test_head_is_what_get_answers_without_its_body(server: ThreadServer, path: str) -> None:
    answered = said(server, b"HEAD %b HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n" % path.encode())
    head, _, body = answered.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200")
    assert int(head.lower().partition(b"content-length: ")[2].split()[0]) > 0
    assert not body


def test_head_is_405_where_there_is_no_get(server: ThreadServer) -> None:
    assert asked(server, "HEAD", "/v1/completions")[0] == 405


def test_what_is_no_http_is_an_error_object_and_one_line_in_the_log(
    server: ThreadServer, caplog: pytest.LogCaptureFixture
) -> None:
    for sent in [b"\0\1 garbage\x1b[31m\r\n\r\n"] * 5:
        head, _, body = said(server, sent).partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400")
        assert json.loads(body)["error"]["type"] == "BadRequestError"
    told = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(told) <= 1
    assert all("127.0.0.1" in line and line.isprintable() for line in told)


def test_a_rare_line_is_told_at_once_and_then_counted(caplog: pytest.LogCaptureFixture) -> None:
    line = RareLine(interval=1e9)
    for _ in range(4):
        line.tell("odd")
    line._next_at = time.monotonic()
    line.tell("odd")
    assert [record.getMessage() for record in caplog.records] == ["odd", "odd (and 3 more since the last such line)"]


def test_a_websocket_is_refused_without_advice_in_the_log(
    server: ThreadServer, caplog: pytest.LogCaptureFixture
) -> None:
    upgrade = b"Upgrade: websocket\r\nConnection: Upgrade, close\r\nSec-WebSocket-Version: 13\r\n"
    with connected(server) as connection:
        connection.sendall(b"GET /v1/completions HTTP/1.1\r\nHost: x\r\n" + upgrade + b"\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 405")
    assert not caplog.records


@pytest.mark.parametrize("count", [1, 5])
def test_a_broken_connection_is_no_error_whichever_of_its_requests_is_answered(
    server: ThreadServer, caplog: pytest.LogCaptureFixture, count: int
) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 200, "n": 8, "stream": True, "ignore_eos": True, "logprobs": 5})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    request = f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode()
    for _ in range(3):
        with connected(server) as connection:
            connection.sendall(request * count)
            connection.recv(100)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # a reset
    server.wait_until_idle()
    assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("count", [2, 5])
def test_the_first_of_pipelined_requests_is_aborted_when_the_client_leaves(server: ThreadServer, count: int) -> None:
    body = json.dumps({"prompt": "hi", "max_tokens": 200, "n": 8, "ignore_eos": True})
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    before = server.service.observation.http.answers()
    with connected(server) as connection:
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode() * count)
        wait_for(lambda: server.service.num_open > 0, "nothing was begun")
    server.wait_until_idle()
    after = server.service.observation.http.answers()
    assert [key.status for key in after if after[key] != before.get(key, 0)] == ["499"]


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/v1/embeddings", "embeddings are not available"),
        ("/v1/responses", "Responses API is not available"),
        ("/v1/audio/transcriptions", "audio is not available"),
        ("/v1/images/generations", "images are not available"),
        ("/v1/files", "uploads are not available"),
        ("/v1/files/abc", "uploads are not available"),
        ("/v1/load_lora_adapter", "LoRA adapters are not available"),
        ("/score", "scoring is not available"),
        ("/rerank", "reranking is not available"),
        ("/v1/embeddingsx", "no such endpoint"),
    ],
)
def test_an_endpoint_that_is_not_there_is_404_by_the_name_of_its_feature(
    server: ThreadServer, path: str, words: str
) -> None:
    status, content, _ = asked(server, "POST", path, {"input": "hi"})
    error = json.loads(content)["error"]
    assert (status, error["type"]) == (404, "NotFoundError")
    assert words in error["message"]


LONG = "hi the " * 5000


@pytest.mark.parametrize(
    ("path", "body", "param", "words"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": LONG}]}, "messages", ""),
        ("/v1/chat/completions", {}, "messages", "messages is missing; give a list of messages"),
        ("/v1/completions", {"prompt": [1, 2, 9_999_999]}, "prompt", ""),
        ("/v1/completions", {"prompt": [[1], [9_999_999]]}, "prompt", "prompt 1"),
        ("/v1/completions", {"prompt": LONG}, "prompt", ""),
        ("/v1/completions", {}, "prompt", "prompt is missing; give text"),
        ("/v1/completions", [], None, "the body=[] is not valid: it must be a JSON object"),
        ("/v1/completions", {"prompt": "a", "stream": "yes"}, "stream", "stream='yes' is not valid: it must be true"),
        ("/v1/completions", {"prompt": "a", "stream_options": 1}, "stream_options", "a JSON object"),
        ("/v1/completions", {"prompt": "a", "priority": 2**40}, "priority", "at most 2147483647"),
        ("/v1/completions", {"prompt": "a", "user": ""}, "user", "text of at least 1 characters"),
        ("/v1/completions", {"prompt": "a", "timeout": 0}, "timeout", "above 0"),
        ("/v1/completions", {"prompt": "a", "scheduling": []}, "scheduling", "a JSON object"),
        ("/v1/chat/completions", {"messages": [], "reasoning_effort": "x"}, "reasoning_effort", "one of 'none'"),
        ("/tokenize", {"prompt": LONG * 100}, "prompt", ""),
        ("/detokenize", {}, "tokens", "tokens is missing; give a list of token ids"),
    ],
)
def test_a_refusal_names_the_field_that_was_sent_in_words_of_our_own(
    server: ThreadServer, path: str, body: object, param: str | None, words: str
) -> None:
    status, content, _ = asked(server, "POST", path, body)
    error = json.loads(content)["error"]
    assert (status, error["param"]) == (400, param)
    assert words in error["message"]
    assert not any(word in error["message"] for word in ("Input should", "Field required", "dictionary"))


@pytest.mark.parametrize(("header", "hint"), [("X-Tokenyard-Foo", None), ("X-Tokenyard-Priorty", "priority")])
def test_an_unknown_header_is_corrected_only_where_something_is_near(
    server: ThreadServer, header: str, hint: str | None
) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    headers = {"Content-Type": "application/json", header: "1"}
    connection.request("POST", "/v1/completions", json.dumps({"prompt": "hi"}), headers)
    message = json.loads(connection.getresponse().read())["error"]["message"]
    connection.close()
    assert ("did you mean" in message) == (hint is not None)
    assert hint is None or f"did you mean 'x-tokenyard-{hint}'" in message
