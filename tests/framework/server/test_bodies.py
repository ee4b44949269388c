"""What a body may be: its type, its length, its JSON; and the head before it."""

from __future__ import annotations

import contextlib
import http.client
import json
import select
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from http_server import ThreadServer, running_server, wait_for
from hypothesis import given
from hypothesis import strategies as st
from starlette.exceptions import HTTPException
from starlette.requests import Request
from tokenyard.server import body as bodies
from tokenyard.server import head_limits, strict_json
from tokenyard.server.strict_json import parse_json

JSON = {"Content-Type": "application/json"}
LIMIT = 64 * 1024
MESSAGES = [{"role": "user", "content": "hi"}]
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.fixture(scope="module")
def small(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    """Takes bodies of 64 KiB."""
    with running_server([f"server.max_body_bytes={LIMIT}"], model=tiny_llama_dir) as running:
        yield running


def post(
    server: ThreadServer, path: str, body: bytes, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, object]]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    try:
        connection.request("POST", path, body=body, headers=JSON if headers is None else headers)
        answer = connection.getresponse()
        content = json.loads(answer.read())
        assert content["error"]["code"] == answer.status
        assert content["error"]["message"]
        return answer.status, content["error"]
    finally:
        connection.close()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 415),
        ({"Content-Type": ""}, 415),
        ({"Content-Type": "text/plain"}, 415),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
        ({"Content-Type": "application/json", "Content-Encoding": "gzip"}, 415),
    ],
    ids=["none", "empty", "text", "form", "multipart", "gzip"],
)
def test_api_21_only_json_is_read(server: ThreadServer, path: str, headers: dict[str, str], expected: int) -> None:
    assert post(server, path, b'{"prompt": "hi", "max_tokens": 1}', headers)[0] == expected


BAD_BODIES = {
    "empty": b"",
    "blank": b"  \n",
    "cut": b'{"prompt": "hi"',
    "trailing": b'{"prompt": "hi"} x',
    "list": b"[]",
    "text": b'"hi"',
    "null": b"null",
    "number": b"1",
    "nan": b'{"prompt": "hi", "temperature": NaN}',
    "infinity": b'{"prompt": "hi", "temperature": -Infinity}',
    "beyond a float": b'{"prompt": "hi", "temperature": 1e999}',
    "5000 digits": b'{"prompt": "hi", "max_tokens": ' + b"9" * 5000 + b"}",
    "40 digits": b'{"prompt": ' + b"9" * 40 + b', "tokens": [' + b"9" * 40 + b"]}",
    "a key twice": b'{"prompt": "hi", "max_tokens": 1, "max_tokens": 2}',
    "a key twice, below": b'{"prompt": "hi", "messages": [{"role": "user", "role": "system", "content": "x"}]}',
    "a key twice, escaped": b'{"prompt": "hi", "max_tokens": 1, "max\\u005ftokens": 2}',
    "half a surrogate pair": b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
    "latin-1": '{"prompt": "é", "messages": [{"role": "user", "content": "é"}]}'.encode("latin-1"),
    "10,000 levels": b'{"prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    "10,000 objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "2,000 levels, cut": b"[" * 2000,
}


MANY = 2**18
COSTLY = {
    "lists": b'{"prompt": [' + b"[]," * MANY + b"[]]}",
    "objects": b'{"prompt": "a", "zz": [' + b"{}," * MANY + b"1]}",
    "keys": b"{" + b",".join(b'"k%d":1' % number for number in range(MANY)) + b"}",
    "one key again and again": b"{" + b",".join([b'"k":1'] * MANY) + b"}",
    "texts": b'{"prompt": "a", "stop": [' + b'"a",' * MANY + b'"a"]}',
    "ids": b'{"prompt": [' + b"5," * 2**20 + b"5,5]}",
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", COSTLY)
def test_d18_a_body_of_very_many_parts_is_400_before_it_is_parsed(server: ThreadServer, path: str, name: str) -> None:
    status, error = post(server, path, COSTLY[name])
    assert status == 400
    assert "are allowed" in str(error["message"])


@pytest.mark.parametrize("content", COSTLY.values(), ids=COSTLY)
def test_no_parser_sees_a_body_of_very_many_parts(content: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(strict_json, "msgspec", None)
    with pytest.raises(HTTPException, match="are allowed"):
        parse_json(content)


def test_what_texts_hold_is_not_counted_as_parts() -> None:
    text = json.dumps([{"a": ["\\", '"', {}]}] * 2**15) + '\\"[{,'
    assert parse_json(json.dumps({"prompt": text}).encode()) == {"prompt": text}


def test_as_many_token_ids_as_are_allowed_pass() -> None:
    assert len(parse_json(b"[" + b"5," * strict_json.MAX_ITEMS + b"5]")) == strict_json.MAX_ITEMS + 1  # type: ignore[arg-type]


def test_a_body_is_parsed_once_and_every_route_with_a_body_takes_that_value(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bytes] = []
    monkeypatch.setattr(bodies, "parse_json", lambda content: seen.append(content) or parse_json(content))
    monkeypatch.setattr(Request, "json", None)
    for path in PATHS:
        connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
        sent = json.dumps({"prompt": "hi", "messages": MESSAGES, "tokens": [1], "max_tokens": 1}).encode()
        connection.request("POST", path, body=sent, headers=JSON)
        assert connection.getresponse().status == (400 if path == "/tokenize" else 200)
        connection.close()
    assert len(seen) == len(PATHS)


def test_unfinished_long_bodies_are_503_beyond_what_they_may_hold_and_short_ones_are_served(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "_MOST_AT_ONCE", 2)
    limit = 2**20
    with (
        running_server([f"server.max_body_bytes={limit}"], model=tiny_llama_dir) as server,
        contextlib.ExitStack() as kept,
    ):
        begun = POST + b"Content-Length: %d\r\n\r\n" % limit + b" " * (limit - 1)
        sockets = [kept.enter_context(connected(server)) for _ in range(3)]
        for each in sockets:
            each.sendall(begun)
        refused = [each for each in select.select(sockets, [], [], 30)[0] if each.recv(12) == b"HTTP/1.1 503"]
        assert len(refused) == 1
        assert b"retry-after" in refused[0].recv(2000).lower()
        client = server.client
        assert client.completions.create(model=server.llm.front.model_config.model, prompt="hi", max_tokens=1).choices
        for each in sockets:
            each.close()
        wait_for(lambda: post(server, "/v1/completions", b" " * limit)[0] == 400, "what was held is not given back")


def connected(server: ThreadServer) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").partition(":")
    return socket.create_connection((host, int(port)), timeout=30)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", BAD_BODIES)
def test_d18_a_body_that_is_no_strict_json_object_is_400(server: ThreadServer, path: str, name: str) -> None:
    status, error = post(server, path, BAD_BODIES[name])
    assert (status, error["type"]) == (400, "BadRequestError")


def talk(server: ThreadServer, sent: bytes, *, more: bytes = b"", limit: int = 2**22) -> bytes:
    """Send, then `more` as long as it is taken, `limit` bytes at most; returns all that was answered."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    answered = b""
    with socket.create_connection((host, int(port)), timeout=30) as connection:
        connection.sendall(sent)
        connection.setblocking(False)
        taken, end = 0, time.monotonic() + 30
        while time.monotonic() < end:
            try:
                if more and taken < limit:
                    taken += connection.send(more)
            except BlockingIOError:
                time.sleep(0.001)
            except OSError:
                more = b""  # closed: what was answered before is still to be read
            try:
                part = connection.recv(65536)
            except BlockingIOError:
                time.sleep(0.001 if more else 0.01)
                continue
            except ConnectionError:
                break
            if not part:
                break
            answered += part
            if b"\r\n\r\n" in answered and not more:
                connection.settimeout(0.3)
                more = b""
    return answered


POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def test_d18_a_body_that_says_it_is_too_long_is_413(small: ThreadServer) -> None:
    body = json.dumps({"prompt": "h" * LIMIT}).encode()
    status, error = post(small, "/v1/completions", body)
    assert (status, error["type"]) == (413, "RequestTooLargeError")
    assert "server.max_body_bytes" in str(error["message"])


def test_d18_a_chunked_body_without_an_end_is_413_and_cut_off(small: ThreadServer) -> None:
    chunk = b"1000\r\n" + b" " * 4096 + b"\r\n"
    answered = talk(small, POST + b"Transfer-Encoding: chunked\r\n\r\n", more=chunk)
    assert answered.startswith(b"HTTP/1.1 413")
    assert b"connection: close" in answered.lower()


def test_d18_a_10_mb_text_is_refused_and_the_next_request_is_served(server: ThreadServer) -> None:
    body = json.dumps({"prompt": "h" * 10 * 2**20}).encode()
    status, _ = post(server, "/v1/completions", body)
    assert status == 413
    assert server.get("/v1/models")[0] == 200


def test_a_path_that_does_not_exist_is_404_whatever_the_body(server: ThreadServer) -> None:
    assert post(server, "/v1/nothing", b"{", {})[0] == 404


def test_a_method_that_an_endpoint_does_not_take_is_405(server: ThreadServer) -> None:
    assert server.get("/v1/completions")[0] == 405


def test_a_connection_stays_usable_after_a_refused_body(server: ThreadServer) -> None:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=30)
    for body, headers, expected in [(b"{", JSON, 400), (b"{}", {}, 415), (b"[]", JSON, 400)]:
        connection.request("POST", "/v1/completions", body=body, headers=headers)
        answer = connection.getresponse()
        answer.read()
        assert answer.status == expected
        if answer.headers.get("connection") == "close":
            continue
    connection.request("GET", "/livez")
    assert connection.getresponse().status == 200
    connection.close()


@pytest.mark.parametrize(
    "head",
    [
        b"GET /livez HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 2 * head_limits.MAX_HEAD_BYTES + b"\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\n" + b"X-Many: aaaaaaaaaaaaaaaaaaaaaaaa\r\n" * 4000 + b"\r\n",
        b"GET /" + b"a" * 2 * head_limits.MAX_HEAD_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"\x00\x01\x02 garbage\r\n\r\n",
    ],
    ids=["one long header", "many headers", "a long path", "no HTTP"],
)
def test_d18_a_head_of_more_than_64_kib_is_400(server: ThreadServer, head: bytes) -> None:
    assert talk(server, head).startswith(b"HTTP/1.1 400")


def test_d18_a_header_without_an_end_is_cut_off(server: ThreadServer) -> None:
    answered = talk(server, b"GET /livez HTTP/1.1\r\nX: ", more=b"a" * 4096)
    assert answered == b"" or answered.startswith(b"HTTP/1.1 400")


def test_a_head_just_below_the_limit_is_served(server: ThreadServer) -> None:
    filler = b"a" * (head_limits.MAX_HEAD_BYTES - 500)
    answered = talk(server, b"GET /livez HTTP/1.1\r\nHost: x\r\nConnection: close\r\nX: " + filler + b"\r\n\r\n")
    assert answered.startswith(b"HTTP/1.1 200")


def test_a_head_that_does_not_come_to_its_end_is_not_waited_for(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_limits, "HEAD_TIMEOUT", 0.2)
    with running_server(model=tiny_llama_dir) as server:
        assert talk(server, b"") == b""
        assert talk(server, b"GET /livez HTTP/1.1\r\n") == b""


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=["Cs"]), max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=20,
)


@given(JSON_VALUES)
def test_every_strict_json_value_passes(value: object) -> None:
    try:
        content = json.dumps(value, allow_nan=False).encode()
        content.decode()
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return
    assert parse_json(content) == value


@given(st.binary(max_size=60))
def test_any_bytes_pass_or_are_refused_as_400(content: bytes) -> None:
    status = 200
    try:
        parse_json(content)
    except HTTPException as error:
        status = error.status_code
    assert status in (200, 400)
    if status == 200:
        json.loads(content)
