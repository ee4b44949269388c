"""What the engine cannot go on with, over HTTP: one request fails, plainly, and nobody else notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from chat_calls import SCRIPTED, installed
from http_server import ThreadServer, running_server
from http_streams import ask, eventually, post, run, stream_all, text_of

BODY: dict[str, object] = {"prompt": "hi the", "max_tokens": 40, "ignore_eos": True, "temperature": 0}


def fails_at(count: int) -> dict[str, object]:
    """A request that fails once it has so many tokens."""
    return {**BODY, "extra_args": {"fail_after": count}}


@pytest.fixture(scope="module")
def faulty(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    with installed("script"), running_server((SCRIPTED,), model=tiny_llama_dir) as running:
        yield running


@pytest.mark.parametrize("count", [0, 3])
def test_d6_a_request_that_fails_is_a_500_without_the_cause_and_others_are_as_ever(
    faulty: ThreadServer, count: int
) -> None:
    async def main() -> None:
        alone = (await ask(faulty.url, BODY))[1]["choices"]
        failed, *others = await asyncio.gather(
            ask(faulty.url, fails_at(count)), *(ask(faulty.url, BODY) for _ in "abc")
        )
        assert failed[0] == 500
        assert failed[1]["error"]["type"] == "InternalServerError"
        assert "0x" not in json.dumps(failed[1])
        assert all(answer[1]["choices"] == alone for answer in others)

    run(main())


@pytest.mark.parametrize("streams", [False, True])
def test_api_02_parameters_that_forbid_every_token_are_a_400(faulty: ThreadServer, streams: bool) -> None:
    body = {**BODY, "stream": streams, "allowed_token_ids": [7], "stop_token_ids": [7], "min_tokens": 2}
    status, answer, _ = run(ask(faulty.url, body))
    assert status == 400
    assert "no token is left to sample: allowed_token_ids, min_tokens" in answer["error"]["message"]


def test_api_13_a_fault_before_the_first_token_of_a_stream_is_a_plain_500(faulty: ThreadServer) -> None:
    status, body, headers = run(ask(faulty.url, {**fails_at(0), "stream": True}))
    assert status == 500
    assert headers["content-type"] == "application/json"
    assert body["error"]["code"] == 500


def test_api_13_a_fault_after_the_third_token_is_an_error_event_then_done(faulty: ThreadServer) -> None:
    async def main() -> None:
        whole = text_of(await stream_all(faulty.url, BODY))
        async with post(faulty.url, {**fails_at(3), "stream": True}) as stream:
            await stream.read_head()
            assert stream.status == 200
            *chunks, told, done = [event async for event in stream.events()]
        assert done == "[DONE]"
        error = json.loads(told)["error"]
        assert (error["code"], error["type"]) == (500, "InternalServerError")
        assert "0x" not in told
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert all(choice["finish_reason"] is None for choice in choices)
        text = "".join(choice["text"] for choice in choices)
        assert text
        assert whole.startswith(text)

    run(main())


def test_api_13_the_official_client_raises_in_mid_stream(faulty: ThreadServer, tiny_llama_dir: Path) -> None:
    stream = faulty.client.completions.create(
        model=str(tiny_llama_dir), prompt="hi the", max_tokens=40, stream=True, extra_body=fails_at(3)
    )
    with pytest.raises(openai.APIError):
        list(stream)


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_a_fault_of_one_prompt_ends_all_of_its_call_and_no_other(faulty: ThreadServer, streams: bool) -> None:
    async def main() -> None:
        body = {**fails_at(2), "prompt": ["hi", "the", "he"], "max_tokens": 200, "stream": streams}
        async with post(faulty.url, body) as stream:
            await stream.read_head()
            content = await stream.body()
        assert stream.status == (200 if streams else 500)
        assert content.count(b'"error"') == 1
        await eventually(lambda: faulty.llm.load.num_unfinished == 0, "requests are left")
        await eventually(lambda: faulty.num_used_blocks() == 0, "blocks are left")

    run(main())


def test_after_faults_nothing_is_left_and_the_engine_goes_on(faulty: ThreadServer) -> None:
    async def main() -> None:
        for count in range(5):
            await ask(faulty.url, {**fails_at(count), "n": 3, "temperature": 1})
        assert faulty.llm.load.num_unfinished == 0
        assert (await ask(faulty.url, BODY))[0] == 200

    run(main())
