"""The probes: who may be sent requests, and who not."""

from __future__ import annotations

import asyncio
import json
import signal
import threading

import pytest
from http_server import ThreadServer, wait_for
from starlette.testclient import TestClient
from tokenyard.config import EngineConfig
from tokenyard.server.app import create_app
from tokenyard.server.drain import Drain, signals_to
from tokenyard.server.service import EngineState, Service


@pytest.mark.parametrize("path", ["/livez", "/readyz", "/startupz", "/health"])
def test_every_probe_of_a_ready_server_is_200(server: ThreadServer, path: str) -> None:
    status, body = server.get(path)
    assert (status, json.loads(body)["status"]) == (200, "ok")


@pytest.mark.parametrize(
    ("state", "is_draining", "is_stalled", "expected"),
    [
        (EngineState.READY, False, False, (200, 200, 200, "ok")),
        (EngineState.STARTING, False, False, (200, 503, 503, "starting")),
        (EngineState.READY, True, False, (200, 503, 200, "draining")),
        (EngineState.READY, False, True, (200, 503, 200, "stalled")),
        (EngineState.DEAD, False, False, (503, 503, 503, "dead")),
    ],
)
def test_prc_01_each_probe_answers_its_own_question(
    state: EngineState, is_draining: bool, is_stalled: bool, expected: tuple[int, int, int, str]
) -> None:
    service = Service(config=EngineConfig(), state=state)
    with TestClient(create_app(service)) as client:
        service.is_draining, service.is_stalled = is_draining, is_stalled
        live, ready, startup, health = (client.get(path) for path in ("/livez", "/readyz", "/startupz", "/health"))
        assert (live.status_code, ready.status_code, startup.status_code) == expected[:3]
        assert ready.json()["status"] == expected[3]
        assert (health.status_code, health.json()) == (ready.status_code, ready.json())


def test_a_start_tells_its_phase_and_how_far_it_is() -> None:
    service = Service(config=EngineConfig(), state=EngineState.STARTING, phase="loading x", percent=33)
    with TestClient(create_app(service)) as client:
        assert client.get("/startupz").json() == {"status": "starting", "phase": "loading x", "percent": 33}
        assert client.get("/readyz").json() == {"status": "starting", "phase": "loading x", "percent": 33}


def test_the_version_is_that_of_the_package(server: ThreadServer) -> None:
    from tokenyard import __version__

    assert json.loads(server.get("/version")[1]) == {"version": __version__}


def test_signals_are_only_taken_in_the_main_thread_and_given_back() -> None:
    async def main() -> None:
        drain = Drain(Service(config=EngineConfig()))
        with signals_to(drain):
            seen.append(signal.getsignal(signal.SIGTERM))

    seen: list[object] = []
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    asyncio.run(main())
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)] == before
    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    thread.join()
    in_main, in_other = seen
    assert in_main is not before[0]
    assert in_other is before[0]


def test_num_open_counts_the_answers_that_are_on_their_way(server: ThreadServer) -> None:
    with server.client.completions.create(
        model=server.service.model_names[0], prompt="hi", max_tokens=100, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        assert server.service.num_open == 1
    wait_for(lambda: server.service.num_open == 0, "a request is left")
