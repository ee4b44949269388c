"""What clients are told of errors: never what is inside; and the ids of requests."""

from __future__ import annotations

import http.client
import json
import re
from collections.abc import Iterator

import pytest
from fastapi import FastAPI
from http_server import ThreadServer
from starlette.exceptions import HTTPException
from starlette.testclient import TestClient
from tokenyard.async_llm import AsyncLLM
from tokenyard.config import EngineConfig
from tokenyard.errors import (
    CapacityError,
    DeadlineError,
    EngineDeadError,
    EngineOverloadedError,
    ModelLoadError,
    RequestFailedError,
    TokenyardError,
    UnknownModelError,
    UnsupportedError,
    ValidationError,
)
from tokenyard.server.app import create_app
from tokenyard.server.errors import describe_error
from tokenyard.server.service import EngineState, Service

SECRET = "/home/somebody/secret/engine.py line 3: <tokenyard.Engine object at 0x7f12deadbeef>"
INNARDS = re.compile(r"0x[0-9a-f]{6}|/home/|Traceback|\.py\b|<[a-z.]+ object")

WORKING = [
    ("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 1}),
    ("POST", "/v1/completions", {"prompt": "hi", "max_tokens": 1, "stream": True}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}),
    ("POST", "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
    ("POST", "/tokenize", {"prompt": "hi"}),
    ("POST", "/detokenize", {"tokens": [1]}),
    ("GET", "/v1/models", None),
]


def ask(
    server: ThreadServer, method: str, path: str, body: object, headers: dict[str, str] | None = None
) -> tuple[int, str, http.client.HTTPMessage]:
    connection = http.client.HTTPConnection(server.url.removeprefix("http://"), timeout=60)
    try:
        content = None if body is None else json.dumps(body)
        connection.request(method, path, content, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


@pytest.mark.parametrize(("method", "path", "body"), WORKING)
def test_e4_an_unforeseen_error_tells_nothing_but_an_id(
    server: ThreadServer,
    method: str,
    path: str,
    body: object,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert ask(server, method, path, body)[0] == 200

    def fail(self: AsyncLLM) -> object:
        raise RuntimeError(SECRET)

    monkeypatch.setattr(AsyncLLM, "front", property(fail))
    status, text, headers = ask(server, method, path, body)
    error = json.loads(text)["error"]
    assert (status, error["type"], error["code"]) == (500, "InternalServerError", 500)
    assert headers["x-request-id"] in error["message"]
    assert not INNARDS.search(text)
    assert any(headers["x-request-id"] in record.getMessage() and record.exc_info for record in caplog.records)


@pytest.fixture
def raising() -> Iterator[tuple[FastAPI, list[BaseException], TestClient]]:
    """An application with a route that raises what it is told to."""
    errors: list[BaseException] = []
    app = create_app(Service(config=EngineConfig()))

    @app.get("/raise")
    async def route() -> None:
        raise errors[-1]

    with TestClient(app, raise_server_exceptions=False) as client:
        yield app, errors, client


CASES: list[tuple[BaseException, int, str, str | None]] = [
    (ValidationError("n=0: at least 1", parameter="n", value=0), 400, "BadRequestError", "n"),
    (UnsupportedError("tools are not available", parameter="tools", value=[]), 400, "BadRequestError", "tools"),
    (UnknownModelError("no model x", parameter="model", value="x"), 404, "NotFoundError", "model"),
    (CapacityError("too large"), 400, "BadRequestError", None),
    (ModelLoadError(f"bad file {SECRET}"), 400, "BadRequestError", None),
    (EngineOverloadedError("full", retry_after=7.2), 503, "ServiceUnavailableError", None),
    (EngineDeadError(SECRET), 503, "ServiceUnavailableError", None),
    (DeadlineError("time is up"), 504, "TimeoutError", None),
    (RequestFailedError("the request failed"), 500, "InternalServerError", None),
    (TokenyardError(SECRET), 500, "InternalServerError", None),
    (HTTPException(418, "teapot"), 418, "BadRequestError", None),
    (RuntimeError(SECRET), 500, "InternalServerError", None),
    (MemoryError(SECRET), 500, "InternalServerError", None),
    (RecursionError(SECRET), 500, "InternalServerError", None),
]


@pytest.mark.parametrize(("error", "status", "kind", "param"), CASES, ids=[type(case[0]).__name__ for case in CASES])
def test_every_class_of_error_has_its_status_and_type(
    raising: tuple[FastAPI, list[BaseException], TestClient],
    error: BaseException,
    status: int,
    kind: str,
    param: str | None,
) -> None:
    _, errors, client = raising
    errors.append(error)
    answer = client.get("/raise")
    found = answer.json()["error"]
    assert (answer.status_code, found["type"], found["param"], found["code"]) == (status, kind, param, status)
    assert set(found) == {"message", "type", "param", "code"}
    assert answer.headers["content-type"] == "application/json"
    assert not INNARDS.search(answer.text)
    assert ("retry-after" in answer.headers) == (status == 503)


def test_overload_says_when_to_come_back() -> None:
    reply = describe_error(EngineOverloadedError("full", retry_after=7.2), "id")
    assert reply.headers == {"Retry-After": "7"}


def test_a_message_keeps_what_a_user_wrote_and_loses_what_is_inside() -> None:
    def told(message: str) -> str:
        return json.loads(describe_error(ValidationError(message, parameter="x", value=0), "id").body())["error"][
            "message"
        ]

    assert told("stop='</s>' and 0x10 and a/b and 1/2") == "stop='</s>' and 0x10 and a/b and 1/2"
    assert told("see /v1/models and /openapi.json") == "see /v1/models and /openapi.json"
    assert told("bad /usr/lib/x.py") == "bad ..."
    assert told("got <X object at 0x7f0000000000>") == "got ..."
    assert len(told("x" * 10**6)) <= 2000


def test_d23_ids_are_the_servers_own_and_the_clients_is_a_label(server: ThreadServer) -> None:
    body = {"prompt": "hi", "max_tokens": 1}
    answers = [ask(server, "POST", "/v1/completions", body, {"X-Request-Id": "mine"}) for _ in range(2)]
    assert [status for status, _, _ in answers] == [200, 200]
    assert [headers["x-request-id"] for _, _, headers in answers] == ["mine", "mine"]
    assert len({json.loads(text)["id"] for _, text, _ in answers}) == 2
    own = [ask(server, "GET", "/livez", None)[2]["x-request-id"] for _ in range(2)]
    assert len(set(own)) == 2
    for given in ("x" * 129, "a b", "é".encode().decode("latin-1")):
        echoed = ask(server, "GET", "/livez", None, {"X-Request-Id": given})[2]["x-request-id"]
        assert re.fullmatch(r"[0-9a-f]{32}", echoed)


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/nothing", "/docs", "/redoc", "/v1/models/", "/v1/completions/"])
def test_an_unknown_path_is_404_with_an_error_object(server: ThreadServer, path: str) -> None:
    status, text, _ = ask(server, "GET", path, None)
    assert (status, json.loads(text)["error"]["type"]) == (404, "NotFoundError")


def test_requests_before_the_engine_is_there_are_503() -> None:
    service = Service(config=EngineConfig(), state=EngineState.STARTING)
    with TestClient(create_app(service)) as client:
        for method, path, body in WORKING:
            answer = client.request(method, path, json=body)
            assert (path, answer.status_code) == (path, 503)
            assert int(answer.headers["retry-after"]) >= 1
