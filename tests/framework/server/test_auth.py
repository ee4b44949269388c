"""API keys and hosts: every route needs a key, whatever is written around it."""

from __future__ import annotations

import asyncio
import hmac
import http.client
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

import openai
import pytest
from fastapi.routing import APIRoute
from http_server import ThreadServer, running_server
from starlette.routing import BaseRoute, Route
from starlette.testclient import TestClient
from starlette.types import Message, Receive, Scope, Send
from tokenyard.config import ServerConfig
from tokenyard.errors import UserError
from tokenyard.server import auth
from tokenyard.server.api_keys import read_api_keys
from tokenyard.server.app import create_app
from tokenyard.server.auth import ApiKeys, Authentication
from tokenyard.server.probes import PUBLIC_PATHS
from tokenyard.server.service import Service

KEYS = ("first-key-9f3b", "second-key-77aa")


@pytest.fixture(scope="module")
def locked(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    overrides = ["server.root_path=/llm", "server.allowed_origins=[https://chat.example.org]"]
    with running_server(overrides, model=tiny_llama_dir, api_keys=KEYS) as running:
        yield running


def ask(server: ThreadServer, method: str, target: str, headers: dict[str, str] | None = None) -> tuple[int, str]:
    """As raw as http.client lets it be: the target goes out as it is written."""
    connection = http.client.HTTPConnection(urlsplit(server.url).netloc, timeout=30)
    try:
        connection.putrequest(method, target, skip_host=True, skip_accept_encoding=True)
        for name, value in {"Host": "localhost", **(headers or {})}.items():
            connection.putheader(name, value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode()
    finally:
        connection.close()


def test_e1_all_keys_are_compared_by_digest_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    real = hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append(len(left))
        return real(left, right)

    monkeypatch.setattr(auth.hmac, "compare_digest", compare)
    keys = ApiKeys(KEYS)
    ids = {keys.id_of(key.encode()) for key in KEYS}
    assert len(ids) == 2
    assert None not in ids
    assert not any(key in str(found) for key in KEYS for found in ids)
    assert keys.id_of(b"first-key-9f3c") is None
    assert compared == [32] * 6  # sha256 of each of the two, also after a hit


def endpoints(routes: Iterable[BaseRoute]) -> Iterator[tuple[str, str]]:
    """(method, path) of every route, those of included routers too."""
    for route in routes:
        if isinstance(route, Route | APIRoute):
            yield from ((method, route.path.replace("{", "").replace("}", "")) for method in route.methods or ())
        else:
            yield from endpoints(route.original_router.routes)


def test_e3_every_route_needs_a_key_but_the_probes(locked: ThreadServer) -> None:
    paths = set(endpoints(create_app(locked.service, KEYS).routes))
    assert {path for _, path in paths} >= {
        "/v1/models",
        "/v1/chat/completions",
        "/tokenize",
        "/metrics",
        "/openapi.json",
    }
    open_paths = {path for method, path in paths if ask(locked, method, path)[0] != 401}
    assert open_paths == PUBLIC_PATHS


@pytest.mark.parametrize("is_protected", [True, False])
def test_metrics_are_open_where_that_is_wanted_and_nothing_else_is(locked: ThreadServer, is_protected: bool) -> None:
    config = replace(locked.service.config.server, protect_metrics=is_protected)
    service = replace_server(locked.service, config)
    with TestClient(create_app(service, KEYS), base_url="http://localhost") as client:
        assert client.get("/metrics").status_code == (401 if is_protected else 200)
        assert client.get("/metrics", headers={"Authorization": f"Bearer {KEYS[1]}"}).status_code == 200
        assert client.get("/v1/models").status_code == client.get("/metrics/x").status_code == 401


def replace_server(service: Service, config: ServerConfig) -> Service:
    """Another service with the same engine."""
    return Service(config=replace(service.config, server=config), llm=service.llm)


@pytest.mark.parametrize(
    "given", ["Bearer", "Bearer ", "bearer x", "Basic abc", f"Bearer {KEYS[0]} {KEYS[1]}", KEYS[0]]
)
def test_what_is_no_key_is_401_with_a_challenge(locked: ThreadServer, given: str) -> None:
    status, body = ask(locked, "GET", "/v1/models", {"Authorization": given})
    error = json.loads(body)["error"]
    assert (status, error["type"], error["code"]) == (401, "AuthenticationError", 401)


def test_both_keys_are_accepted_and_the_scheme_in_any_case(locked: ThreadServer) -> None:
    assert [ask(locked, "GET", "/v1/models", {"Authorization": f"bEaReR {key}"})[0] for key in KEYS] == [200, 200]


def test_the_official_client_tells_a_wrong_key(locked: ThreadServer) -> None:
    wrong = openai.OpenAI(base_url=locked.url + "/v1", api_key="wrong", max_retries=0)
    with wrong, pytest.raises(openai.AuthenticationError):
        wrong.models.list()
    assert locked.client.models.list().data


E2_TARGETS = [
    "//health",
    "/health/",
    "/HEALTH",
    "/v1/models?/health",
    "/v1/models#/health",
    "/v1/models/../../health",
    "/health/../v1/models",
    "/health%2f..%2fv1%2fmodels",
    "/llm//health",
    "/v1/models;/health",
    "/health\\v1",
    "/livez/v1/models",
    "/v1%2fmodels",
    "/%76%31/models",
    "/llm/v1/models",
    "//v1/models",
    "http://localhost/v1/models",
    "http://localhost/health/v1/models",
]


@pytest.mark.parametrize("target", E2_TARGETS)
def test_e2_no_spelling_of_a_path_is_a_way_round_the_key(locked: ThreadServer, target: str) -> None:
    status, body = ask(locked, "GET", target)
    assert status in (400, 401)  # not even whether there is such a path
    assert '"object"' not in body


@pytest.mark.parametrize(
    "target", ["/health", "/llm/health", "/%68ealth", "/health?", "/health?x=/v1/models", "http://localhost/health"]
)
def test_e2_a_probe_is_public_however_it_is_reached(locked: ThreadServer, target: str) -> None:
    assert ask(locked, "GET", target)[0] == 200


@pytest.mark.parametrize(
    "host", ["localhost/health?", "localhost/health", "a/livez#", "a b", "", "a@b", "x:99999999", "["]
)
def test_e2_a_host_header_decides_nothing(locked: ThreadServer, host: str) -> None:
    status, body = ask(locked, "GET", "/v1/models", {"Host": host})
    assert status in (400, 401)
    assert '"object"' not in body


def test_a_browser_may_ask_without_a_key_whether_it_may_ask(locked: ThreadServer) -> None:
    asked = {"Origin": "https://chat.example.org", "Access-Control-Request-Method": "POST"}
    assert ask(locked, "OPTIONS", "/v1/chat/completions", asked)[0] == 200
    assert ask(locked, "OPTIONS", "/v1/chat/completions", {**asked, "Origin": "https://evil.example"})[0] == 400
    assert ask(locked, "OPTIONS", "/v1/chat/completions")[0] == 401


def send_to(middleware: Authentication, scope: Scope) -> list[Message]:
    sent: list[Message] = []

    async def receive() -> Message:
        return {"type": "websocket.connect"}

    async def send(message: Message) -> None:
        sent.append(message)

    asyncio.run(middleware(scope, receive, send))
    return sent


def test_e3_a_websocket_needs_a_key_too_even_for_a_public_path() -> None:
    reached: list[str] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        reached.append(scope["path"])

    middleware = Authentication(app, ApiKeys(KEYS), PUBLIC_PATHS)
    scope = {"type": "websocket", "path": "/health", "headers": []}
    assert [message["type"] for message in send_to(middleware, scope)] == ["websocket.close"]
    assert reached == []
    send_to(middleware, {**scope, "headers": [(b"authorization", b"Bearer " + KEYS[0].encode())]})
    assert reached == ["/health"]


def test_a_key_comes_from_flags_a_file_and_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-file\n\nfrom-flag\n", encoding="utf-8")
    assert read_api_keys(["from-flag"], file, {"TOKENYARD_API_KEY": " from-env\n"}) == [
        "from-flag",
        "from-file",
        "from-env",
    ]


@pytest.mark.parametrize(
    ("flags", "content", "environment", "pieces"),
    [
        ([""], None, {}, ("--api-key", "0 characters")),
        (["with blank"], None, {}, ("--api-key", "without blanks")),
        (["x" * 513], None, {}, ("513",)),
        ([], "# none\n", {}, ("no key",)),
        ([], None, {"TOKENYARD_API_KEY": ""}, ("TOKENYARD_API_KEY", "0 characters")),
    ],
)
def test_a_key_that_cannot_be_used_is_refused_without_being_shown(
    tmp_path: Path, flags: list[str], content: str | None, environment: dict[str, str], pieces: tuple[str, ...]
) -> None:
    file = None
    if content is not None:
        file = tmp_path / "keys"
        file.write_text(content, encoding="utf-8")
    with pytest.raises(UserError) as caught:
        read_api_keys(flags, file, environment)
    message = str(caught.value)
    assert [piece for piece in pieces if piece not in message] == []
    assert "with blank" not in message
    assert "\n" not in message


def test_only_allowed_hosts_are_served(tiny_llama_dir: Path) -> None:
    overrides = ["server.allowed_hosts=[llm.example.org,'*.internal']"]
    with running_server(overrides, model=tiny_llama_dir) as server:
        for host, expected in [
            ("llm.example.org", 200),
            ("LLM.example.ORG:8000", 200),
            ("a.internal", 200),
            ("internal", 403),
            ("evil.example", 403),
            ("llm.example.org.evil.example", 403),
            ("llm.example.org/", 400),
        ]:
            assert (host, ask(server, "GET", "/v1/models", {"Host": host})[0]) == (host, expected)
        assert ask(server, "GET", "/health", {"Host": "10.0.0.1:8000"})[0] == 200
