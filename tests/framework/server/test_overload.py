"""More than a server takes: what is refused over HTTP, what is not, and what becomes of those that were let in."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from http_server import ThreadServer, running_server
from http_streams import ask, eventually, paused, post, run, stream_all, text_of

MOST_REQUESTS, MOST_TOKENS = 8, 150
LONG: dict[str, object] = {"prompt": "hi the", "max_tokens": 100, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def limited(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    """One that takes few requests, and runs even fewer at a time."""
    overrides = (
        f"server.max_num_queued_reqs={MOST_REQUESTS}",
        f"server.max_num_queued_tokens={MOST_TOKENS}",
        "scheduler.max_num_seqs=2",
    )
    with running_server(overrides, model=tiny_llama_dir) as running:
        yield running


@pytest.fixture(scope="module")
def tight(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    """A K/V cache for one and a half of the requests that it gets, which is less than the model's longest."""
    with running_server(("kv_cache.num_blocks=12", "kv_cache.block_size=16"), model=tiny_llama_dir) as running:
        yield running


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_2_3_13_exactly_the_excess_is_refused_and_all_others_complete(limited: ThreadServer, streams: bool) -> None:
    async def main() -> None:
        alone = (await ask(limited.url, LONG))[1]["choices"][0]["text"]
        with paused(limited):
            asked = [
                asyncio.create_task(ask(limited.url, {**LONG, "stream": streams}) if not streams else one_stream())
                for _ in range(5 * MOST_REQUESTS)
            ]
            await eventually(lambda: sum(one.done() for one in asked) == 4 * MOST_REQUESTS, "not all are refused")
            await eventually(lambda: limited.llm.load.num_unfinished == MOST_REQUESTS, "never queued")
            refused = [one.result() for one in asked if one.done()]
        answers = [one for one in await asyncio.gather(*asked) if one not in refused]
        assert len(answers) == MOST_REQUESTS
        for status, body, headers in refused:
            assert status == 503
            assert 1 <= int(headers["retry-after"]) <= 60
            assert body["error"]["type"] == "ServiceUnavailableError"
            assert "server.max_num_queued_reqs" in body["error"]["message"]
        for status, body, _ in answers:
            assert status == 200
            assert body["choices"][0]["text"] == alone

    async def one_stream() -> tuple[int, dict[str, object], dict[str, str]]:
        async with post(limited.url, {**LONG, "stream": True}) as stream:
            await stream.read_head()
            if stream.status != 200:
                return stream.status, json.loads(await stream.body()), stream.headers
            text = text_of([event async for event in stream.events()])
            return 200, {"choices": [{"text": text}]}, stream.headers

    run(main())


def test_2_3_13_choices_and_prompts_count_each(limited: ThreadServer) -> None:
    async def main() -> None:
        with paused(limited):
            first = asyncio.create_task(ask(limited.url, {**LONG, "n": 3, "prompt": ["hi", "the"], "temperature": 1}))
            await eventually(lambda: limited.llm.load.num_unfinished == 6, "never queued")
            assert (await ask(limited.url, {**LONG, "n": 3, "temperature": 1}))[0] == 503
            second = asyncio.create_task(ask(limited.url, {**LONG, "n": 2, "temperature": 1}))
            await eventually(lambda: limited.llm.load.num_unfinished == 8, "never queued")
        assert (await first)[0] == (await second)[0] == 200
        status, body, _ = await ask(limited.url, {**LONG, "n": 3, "prompt": ["hi", "the", "he"], "temperature": 1})
        assert status == 400  # there will never be room
        assert body["error"]["param"] == "n"

    run(main())


def test_2_3_14_a_backlog_of_tokens_refuses_long_prompts_and_lets_short_ones_in(limited: ThreadServer) -> None:
    long = {**LONG, "prompt": [5] * 100}
    short = {**LONG, "prompt": [5] * 10}

    async def main() -> None:
        with paused(limited):
            first = asyncio.create_task(ask(limited.url, long))
            await eventually(lambda: limited.llm.load.num_queued_tokens == 100, "never queued")
            status, body, headers = await ask(limited.url, long)
            assert status == 503
            assert "server.max_num_queued_tokens" in body["error"]["message"]
            assert 1 <= int(headers["retry-after"]) <= 60
            others = [asyncio.create_task(ask(limited.url, short)) for _ in range(5)]
            await eventually(lambda: limited.llm.load.num_queued_tokens == 150, "the short ones are not let in")
            assert (await ask(limited.url, {**LONG, "prompt": "hi"}))[0] == 503  # text counts too, once it is tokenized
        assert [(await one)[0] for one in (first, *others)] == [200] * 6
        assert limited.llm.load.num_queued_tokens == 0
        assert (await ask(limited.url, long))[0] == 200

    run(main())


def test_a_refused_request_of_the_official_client_is_a_server_error_with_its_time_to_wait(
    limited: ThreadServer, tiny_llama_dir: Path
) -> None:
    create = limited.client.completions.create

    async def main() -> None:
        with paused(limited):
            asked = [asyncio.create_task(ask(limited.url, LONG)) for _ in range(MOST_REQUESTS)]
            await eventually(lambda: limited.llm.load.num_unfinished == MOST_REQUESTS, "never queued")
            with pytest.raises(openai.InternalServerError) as caught:
                await asyncio.to_thread(create, model=str(tiny_llama_dir), prompt="hi")
            assert caught.value.status_code == 503
            assert caught.value.response.headers["retry-after"]
        await asyncio.gather(*asked)

    run(main())


def test_2_3_13_a_client_that_leaves_makes_room_for_another(limited: ThreadServer) -> None:
    async def main() -> None:
        with paused(limited):
            async with post(limited.url, {**LONG, "n": MOST_REQUESTS, "temperature": 1}) as stream:
                await eventually(lambda: limited.llm.load.num_unfinished == MOST_REQUESTS, "never queued")
                assert (await ask(limited.url, LONG))[0] == 503
                stream.drop()
                await eventually(lambda: limited.llm.load.num_unfinished == 0, "it is still there")
        assert (await ask(limited.url, LONG))[0] == 200

    run(main())


def test_a_server_that_is_shutting_down_refuses_what_is_new_and_goes_on_with_what_is_not(
    limited: ThreadServer,
) -> None:
    async def main() -> None:
        with paused(limited):
            running = asyncio.create_task(ask(limited.url, LONG))
            await eventually(lambda: limited.llm.load.num_unfinished == 1, "never queued")
            limited.service.is_draining = True
            try:
                status, _, headers = await ask(limited.url, LONG)
            finally:
                limited.service.is_draining = False
        assert status == 503
        assert "retry-after" in headers
        assert (await running)[0] == 200

    run(main())


def test_2_3_15_requests_that_do_not_fit_together_are_preempted_and_have_the_tokens_of_each_alone(
    tight: ThreadServer,
) -> None:
    bodies = [
        {**LONG, "prompt": text, "max_tokens": 110} for text in ("hi", "the", "he", "hi the", "the he", "i", "e", "h")
    ]

    async def main() -> None:
        alone = [text_of(await stream_all(tight.url, body)) for body in bodies]
        together = await asyncio.gather(*(stream_all(tight.url, body) for body in bodies))
        assert [text_of(events) for events in together] == alone

    run(main())
    assert tight.llm._link.stats().num_preemptions > 0


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "stream"])
def test_2_3_16_a_request_that_can_never_fit_is_refused_with_the_numbers(tight: ThreadServer, streams: bool) -> None:
    status, body, _ = run(ask(tight.url, {**LONG, "prompt": [5] * 220, "max_tokens": 30, "stream": streams}))
    assert status == 400
    assert "220 tokens but the whole K/V cache holds 192" in body["error"]["message"]
