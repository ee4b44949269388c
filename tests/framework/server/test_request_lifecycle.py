"""Requests over HTTP from their arrival to their end, however that comes: nothing is left, and others are unharmed."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from http_server import ThreadServer
from http_streams import COMPLETIONS, DEADLINE, ask, engine_thread, eventually, paused, post, run, stream_all, text_of
from tokenyard.interfaces.engine_core import EngineCore
from tokenyard.request import FinishReason

CHAT = "/v1/chat/completions"
LONG: dict[str, object] = {"prompt": "hi the", "max_tokens": 240, "ignore_eos": True, "temperature": 0}
SHORT = {**LONG, "max_tokens": 8}


def num_unfinished(server: ThreadServer) -> int:
    return server.llm.load.num_unfinished


def engine_requests(server: ThreadServer) -> int:
    stats = server.llm._link.stats()
    return stats.num_running + stats.num_waiting


def prompt_tokens(server: ThreadServer) -> int:
    """Of all requests that were ever admitted."""
    return server.llm._link.stats().num_prompt_tokens


@contextlib.contextmanager
def recorded_finishes(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The engine ids that the front end has told the engine to end."""
    told: list[str] = []
    link = server.llm._link
    finish = link.finish

    def record(request_ids: Sequence[str], reason: FinishReason) -> None:
        told.extend(request_ids)
        finish(request_ids, reason)

    with monkeypatch.context() as patched:
        patched.setattr(link, "finish", record)
        yield told


# ---- Clients that leave ----------------------------------------------------------------------------------------------

BODIES = {
    "non-stream": LONG,
    "stream": {**LONG, "stream": True},
    "a batch of prompts": {**LONG, "prompt": ["hi", "the", "he"]},
    "n choices": {**LONG, "n": 4, "temperature": 1.0, "stream": True},
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_req_03_a_disconnect_ends_running_requests_and_frees_their_blocks(
    server: ThreadServer, body: dict[str, object]
) -> None:
    async def main() -> None:
        async with post(server.url, body) as stream:
            if body.get("stream"):
                await stream.read_head()
            await eventually(lambda: server.num_used_blocks() > 0, "never ran")
            with paused(server):  # so that it cannot end by itself
                was_running = engine_requests(server)
                stream.drop()
                await eventually(lambda: engine_requests(server) == 0, "it is still in the engine")
        assert was_running > 0
        await eventually(lambda: server.num_used_blocks() == 0, "blocks are left")
        assert num_unfinished(server) == 0

    run(main())


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES.keys())
def test_2_3_11_a_disconnect_while_it_waits_ends_a_request_that_never_ran(
    server: ThreadServer, body: dict[str, object]
) -> None:
    async def main() -> None:
        with paused(server):
            before = prompt_tokens(server)
            async with post(server.url, body) as stream:
                await eventually(lambda: engine_requests(server) > 0, "never queued")
                stream.drop(abruptly=True)
                await eventually(lambda: engine_requests(server) == 0, "it is still in the engine")
        assert prompt_tokens(server) == before
        assert num_unfinished(server) == 0

    run(main())


def test_a_client_that_has_left_is_no_error_in_the_log(server: ThreadServer, caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        for body in (LONG, {**LONG, "stream": True}):
            with paused(server):
                async with post(server.url, body) as stream:
                    await eventually(lambda: engine_requests(server) > 0, "never queued")
                    stream.drop()
                    await eventually(lambda: server.service.num_open == 0, "the answer goes on")

    with caplog.at_level(logging.ERROR):
        run(main())
    assert caplog.records == []


def test_req_04_whole_streams_cause_no_abort_and_each_abandoned_one_a_single_one(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def abandoned() -> None:
        async with post(server.url, {**LONG, "stream": True}) as stream:
            await stream.read_head()
            await anext(stream.events())
            with paused(server):  # so that it cannot end by itself
                stream.drop()
                await eventually(lambda: engine_requests(server) == 0, "requests are left")

    async def main() -> None:
        with recorded_finishes(server, monkeypatch) as told:
            await asyncio.gather(*(stream_all(server.url, SHORT) for _ in range(100)))
            assert told == []
            for _ in range(10):
                await abandoned()
        assert len(told) == len(set(told)) == 10

    run(main())


def test_req_05_a_disconnect_reaches_every_choice(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        body = {**LONG, "n": 4, "temperature": 1.0, "stream": True}
        with recorded_finishes(server, monkeypatch) as told:
            async with post(server.url, body) as stream:
                await stream.read_head()
                await anext(stream.events())
                with paused(server):
                    assert engine_requests(server) == 4
                    stream.drop()
                    await eventually(lambda: engine_requests(server) == 0, "children are left")
        assert sorted(name.partition("_")[0] for name in told) == ["0", "1", "2", "3"]

    run(main())


def test_req_05_choices_that_end_at_different_lengths_keep_their_own_ends(client: openai.OpenAI, model: str) -> None:
    arguments: dict[str, Any] = {"model": model, "prompt": "hi", "n": 3, "seed": 1, "max_tokens": 60, "temperature": 2}
    first = client.completions.create(**arguments)
    stop = first.choices[1].text[5]
    whole = client.completions.create(**arguments, stop=[stop]).choices
    for choice, unstopped in zip(whole, first.choices, strict=True):
        assert choice.text == unstopped.text.partition(stop)[0]
        assert choice.finish_reason == ("stop" if stop in unstopped.text else unstopped.finish_reason)
    assert len({len(choice.text) for choice in whole}) > 1


def test_e3_others_complete_when_some_of_many_streams_are_cancelled(server: ThreadServer) -> None:
    async def cancelled(index: int) -> None:
        async with post(server.url, {**LONG, "stream": True}) as stream:
            await stream.read_head()
            events = stream.events()
            for _ in range(index % 5):
                await anext(events)
            stream.drop(abruptly=bool(index % 2))

    async def main() -> None:
        alone = text_of(await stream_all(server.url, LONG))
        results = await asyncio.gather(
            *(stream_all(server.url, LONG) if index % 3 else cancelled(index) for index in range(30))
        )
        for events in results:
            if events is not None:
                assert text_of(events) == alone
        await eventually(lambda: engine_requests(server) == 0, "requests are left")
        assert num_unfinished(server) == 0

    run(main())


def test_e4_an_abort_from_within_ends_streams_and_answers_with_what_they_have(server: ThreadServer) -> None:
    async def main() -> None:
        async with post(server.url, {**LONG, "stream": True}) as stream, post(server.url, LONG) as whole:
            await stream.read_head()
            events = stream.events()
            seen = [await anext(events)]
            await eventually(lambda: engine_requests(server) == 2, "not both run")
            with paused(server):
                server.llm.abort_all()
                seen += [event async for event in events]
            await whole.read_head()
            assert whole.status == 200
            (choice,) = json.loads(await whole.body())["choices"]
        assert choice["finish_reason"] == "abort"
        assert seen[-1] == "[DONE]"
        assert json.loads(seen[-2])["choices"][0]["finish_reason"] == "abort"

    run(main())


# ---- Names -----------------------------------------------------------------------------------------------------------


def test_req_01_two_live_requests_with_one_id_do_not_mix(server: ThreadServer) -> None:
    async def main() -> None:
        headers = {"X-Request-Id": "mine"}
        bodies = [{**LONG, "prompt": text, "request_id": "mine"} for text in ("hi", "the he")]
        alone = [(await ask(server.url, body))[1]["choices"][0]["text"] for body in bodies]
        with paused(server):
            asked = [asyncio.create_task(ask(server.url, body, headers=headers)) for body in bodies]
            await eventually(lambda: engine_requests(server) == 2, "not both are there")
        answers = await asyncio.gather(*asked)
        assert [body["choices"][0]["text"] for _, body, _ in answers] == alone
        assert len({body["id"] for _, body, _ in answers}) == 2
        assert [found["x-request-id"] for _, _, found in answers] == ["mine", "mine"]
        again = await ask(server.url, bodies[0], headers=headers)
        assert again[1]["choices"][0]["text"] == alone[0]

    run(main())


def test_2_3_23_aborting_what_is_not_there_changes_nothing(server: ThreadServer) -> None:
    link = server.llm._link
    link.finish(["unknown", "0_unknown", ""], FinishReason.ABORT)
    server.llm._client.abort(["unknown"])
    server.llm.abort_all()
    server.llm.abort_all()
    status, _, _ = run(ask(server.url, SHORT))
    assert status == 200


# ---- Deadlines -------------------------------------------------------------------------------------------------------

DEADLINES = {
    "the body's timeout": ({"timeout": 0.05}, {}),
    "the body's hint": ({"scheduling": {"deadline": 0.05}}, {}),
    "X-Tokenyard-Timeout": ({}, {"X-Tokenyard-Timeout": "0.05"}),
    "X-Tokenyard-Deadline": ({}, {"X-Tokenyard-Deadline": "0.05"}),
}


@pytest.mark.parametrize(("fields", "headers"), DEADLINES.values(), ids=DEADLINES.keys())
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_2_3_22_a_request_that_waits_past_its_deadline_is_504(
    server: ThreadServer, fields: dict[str, object], headers: dict[str, str], streams: bool
) -> None:
    with paused(server):
        status, body, _ = run(ask(server.url, {**LONG, **fields, "stream": streams}, headers=headers))
        assert engine_requests(server) == 0
    assert status == 504
    assert body["error"]["type"] == "TimeoutError"
    assert "time was up" in body["error"]["message"]
    assert num_unfinished(server) == 0


def test_2_3_22_a_stream_that_runs_past_its_deadline_ends_with_an_error_event(server: ThreadServer) -> None:
    async def main() -> None:
        async with post(server.url, {**LONG, "timeout": 0.4, "stream": True}) as stream:
            await stream.read_head()
            assert stream.status == 200
            events = stream.events()
            seen = [await anext(events)]
            with paused(server):
                seen += [event async for event in events]
        assert seen[-1] == "[DONE]"
        assert json.loads(seen[-2])["error"]["code"] == 504
        assert all(json.loads(event)["choices"][0]["finish_reason"] is None for event in seen[:-2])
        await eventually(lambda: server.num_used_blocks() == 0, "blocks are left")

    run(main())


def test_2_3_22_a_request_that_runs_past_its_deadline_is_504(server: ThreadServer) -> None:
    async def main() -> None:
        async with post(server.url, {**LONG, "timeout": 0.4}) as stream:
            await eventually(lambda: server.num_used_blocks() > 0, "never ran")
            with paused(server):
                await stream.read_head()
        assert stream.status == 504
        await eventually(lambda: server.num_used_blocks() == 0, "blocks are left")

    run(main())


def test_an_engine_that_hangs_keeps_nobody_waiting_past_a_deadline(
    server: ThreadServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tokenyard.server.generation._GRACE", 0.1)
    goes_on = threading.Event()

    def hang(core: EngineCore) -> None:
        goes_on.wait(DEADLINE)

    engine_thread(server).post(hang)
    try:
        status, _, _ = run(ask(server.url, {**LONG, "timeout": 0.05}))
        assert status == 504
    finally:
        goes_on.set()


def test_a_deadline_that_is_met_changes_nothing(server: ThreadServer) -> None:
    async def main() -> None:
        expected = (await ask(server.url, SHORT))[1]["choices"]
        assert (await ask(server.url, {**SHORT, "timeout": 60}))[1]["choices"] == expected

    run(main())


# ---- Errors ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("fields", [{"n": 0}, {"temperature": -1}, {"scheduling": {"nothing": 1}}, {"timeout": -1}])
def test_api_13_a_stream_that_is_refused_is_a_plain_400(
    server: ThreadServer, path: str, fields: dict[str, object]
) -> None:
    prompt = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    status, body, headers = run(ask(server.url, {**prompt, "stream": True, **fields}, path))
    assert status == 400
    assert headers["content-type"] == "application/json"
    assert body["error"]["param"].split(".")[0] in fields


def test_a_call_that_the_engine_refuses_is_answered_at_once(server: ThreadServer) -> None:
    """After the front end's checks: all or none."""

    async def main() -> None:
        with paused(server):
            client = server.llm._client
            asked = asyncio.create_task(ask(server.url, {**LONG, "prompt": ["hi", "the", "he"]}))
            await eventually(lambda: engine_requests(server) == 3, "never queued")
            names = list(client._streams)
            client.refuse(names, RuntimeError("planted"))
            status, body, _ = await asked
            assert status == 500
            assert "planted" not in json.dumps(body)
            server.llm._link.finish(names, FinishReason.ABORT)  # a real refusal leaves none there
            await eventually(lambda: engine_requests(server) == 0, "requests are left")

    run(main())


def test_x_tokenyard_headers_that_nobody_knows_are_refused_by_name(server: ThreadServer) -> None:
    status, body, _ = run(ask(server.url, SHORT, headers={"X-Tokenyard-Prioritty": "1"}))
    assert status == 400
    assert body["error"]["param"] == "x-tokenyard-prioritty"
    assert "x-tokenyard-priority" in body["error"]["message"]


@pytest.fixture
def model(tiny_llama_dir: Path) -> str:
    return str(tiny_llama_dir)
