"""The official asynchronous client: many requests at once, and requests that are cancelled."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import openai
import pytest
from http_server import DEADLINE, ThreadServer, running_server
from openai.types.chat import ChatCompletion
from openai.types.completion_usage import CompletionUsage

NUM_REQUESTS = 64
T = TypeVar("T")


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    with running_server(["server.served_model_name=[tiny]"], model=tiny_llama_dir) as running:
        yield running


@dataclass(frozen=True)
class Asked:
    """One request; streamed or not, its answer is the same."""

    messages: list[Any]
    fields: dict[str, Any]
    is_stream: bool


def random_requests() -> list[Asked]:
    """Greedy and seeded ones of different lengths, with one or more choices, half of them streamed."""
    draw = random.Random(6)
    requests = []
    for number in range(NUM_REQUESTS):
        sampling: dict[str, Any] = {"temperature": 0} if draw.random() < 0.5 else {"seed": number, "temperature": 1.0}
        fields = {**sampling, "n": draw.choice([1, 1, 1, 2]), "max_tokens": draw.randint(1, 40)}
        fields |= {"stop": draw.choice([None, None, "h", ["a", "\n"]]), "extra_body": {"ignore_eos": True}}
        messages = [{"role": "user", "content": "hi the " * draw.randint(0, 8) + str(number)}]
        requests.append(Asked(messages, fields, number % 2 == 0))
    return requests


@asynccontextmanager
async def connected(server: ThreadServer) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1",
        api_key="none",
        max_retries=0,
        timeout=DEADLINE,
        _strict_response_validation=True,
    ) as client:
        yield client


def run(main: Callable[[], Awaitable[T]]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(main(), DEADLINE)

    return asyncio.run(limited())


async def answer(client: openai.AsyncOpenAI, asked: Asked) -> object:
    """(text and finish reason of each choice, completion tokens)."""
    usage: CompletionUsage | None
    choices: list[tuple[str, str | None]]
    if not asked.is_stream:
        whole: ChatCompletion = await client.chat.completions.create(
            model="tiny", messages=asked.messages, **asked.fields
        )
        choices = [(choice.message.content or "", choice.finish_reason) for choice in whole.choices]
        usage = whole.usage
    else:
        texts: dict[int, str] = {}
        reasons: dict[int, str | None] = {}
        stream = await client.chat.completions.create(
            model="tiny", messages=asked.messages, stream=True, stream_options={"include_usage": True}, **asked.fields
        )
        async for chunk in stream:
            usage = chunk.usage
            for one in chunk.choices:
                texts[one.index] = texts.get(one.index, "") + (one.delta.content or "")
                reasons[one.index] = reasons.get(one.index) or one.finish_reason
        choices = [(texts[index], reasons[index]) for index in sorted(texts)]
    assert usage is not None
    return choices, usage.completion_tokens


@pytest.mark.slow
def test_64_requests_at_once_are_each_answered_as_if_they_were_alone(server: ThreadServer) -> None:
    requests = random_requests()

    async def together() -> list[object]:
        async with connected(server) as client:
            return await asyncio.gather(*(answer(client, asked) for asked in requests))

    async def alone() -> list[object]:
        async with connected(server) as client:
            return [await answer(client, Asked(one.messages, one.fields, not one.is_stream)) for one in requests]

    assert run(together) == run(alone)
    server.wait_until_idle()


def test_errors_of_some_do_not_touch_the_others(server: ThreadServer) -> None:
    requests = random_requests()[:16]

    async def main() -> tuple[list[object | BaseException], list[object]]:
        async with connected(server) as client:
            refused = [Asked(one.messages, {**one.fields, "temperature": 9}, one.is_stream) for one in requests]
            mixed = [answer(client, one) for pair in zip(requests, refused, strict=True) for one in pair]
            found = await asyncio.gather(*mixed, return_exceptions=True)
            return found, [await answer(client, one) for one in requests]

    found, alone = run(main)
    assert found[::2] == alone
    assert {type(error) for error in found[1::2]} == {openai.BadRequestError}


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_task_that_is_cancelled_ends_its_request(server: ThreadServer, is_stream: bool) -> None:
    """Cancelled at random points, among others that go on: nothing is left in the engine, and the others are whole."""
    asked = Asked([{"role": "user", "content": "hi"}], {"extra_body": {"ignore_eos": True}}, is_stream)
    short = random_requests()[1]

    async def main() -> None:
        draw = random.Random(3)
        async with connected(server) as client:
            expected = await answer(client, short)
            tasks = [asyncio.create_task(answer(client, asked)) for _ in range(24)]
            others = [asyncio.create_task(answer(client, short)) for _ in range(4)]
            for task in tasks:
                await asyncio.sleep(draw.random() * 0.01)
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert any(isinstance(end, asyncio.CancelledError) for end in ended)
            assert await asyncio.gather(*others) == [expected] * 4

    run(main)
    server.wait_until_idle()


def test_a_stream_that_is_left_in_the_middle_ends_its_request(server: ThreadServer) -> None:
    async def main() -> None:
        async with connected(server) as client:
            stream = await client.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "hi"}],
                stream=True,
                extra_body={"ignore_eos": True},
            )
            async with stream:
                async for chunk in stream:
                    if chunk.choices and chunk.choices[0].delta.content:
                        break

    run(main)
    server.wait_until_idle()
