"""Many clients at once: each gets its own tokens in order and once, and those that leave or do not read cost nobody."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import random
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from http_server import ThreadServer, running_server, server_process
from http_streams import RawStream, eventually, post, run, stream_all, text_of

PROMPTS = ["hi", "the", "hi the he", "he", "t", "e h i", "the the", "hihi"]
BODY: dict[str, object] = {"ignore_eos": True, "temperature": 0}


def body_of(index: int) -> dict[str, object]:
    """Of stream number `index`: some prompt, some length."""
    return {**BODY, "prompt": PROMPTS[index % len(PROMPTS)], "max_tokens": 10 + 7 * (index % 13)}


async def expected_texts(url: str) -> dict[str, str]:
    longest = {"max_tokens": 240, "stream": False}
    events = [await stream_all(url, {**BODY, **longest, "prompt": prompt}) for prompt in PROMPTS]
    return dict(zip(PROMPTS, map(text_of, events), strict=True))


async def check_streams(server: ThreadServer, count: int) -> None:
    texts = await expected_texts(server.url)
    streams = await asyncio.gather(*(stream_all(server.url, body_of(index)) for index in range(count)))
    for index, events in enumerate(streams):
        body = body_of(index)
        assert texts[str(body["prompt"])].startswith(text_of(events).rstrip("\ufffd"))
        chunks = [json.loads(event) for event in events[:-1]]
        reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
        assert reasons == [None] * (len(reasons) - 1) + ["length"]
        assert len({chunk["id"] for chunk in chunks}) == 1


def test_64_streams_at_once_are_complete_and_each_is_its_own(server: ThreadServer) -> None:
    run(check_streams(server, 64))


@pytest.mark.slow
def test_256_streams_at_once_are_complete_and_each_is_its_own(server: ThreadServer) -> None:
    run(check_streams(server, 256))


# ---- Clients that leave ----------------------------------------------------------------------------------------------


async def leave_at(server: ThreadServer, chance: random.Random) -> None:
    """Take a random number of events, or not even the head, and close."""
    body = {**BODY, "prompt": "hi the", "max_tokens": 200, "stream": chance.random() < 0.8}
    async with post(server.url, body) as stream:
        num_events = chance.choice([-1, 0, 1, 2, 5, 20])
        if num_events < 0 or not body["stream"]:
            await asyncio.sleep(0.05 * chance.random())
        else:
            await stream.read_head()
            events = stream.events()
            for _ in range(num_events):
                await anext(events, None)
        stream.drop(abruptly=chance.random() < 0.5)


MOST_GROWTH = 8 * 2**20  # bytes: an allocator's moods; of 200 streams in each of 24 rounds less than 2 KiB each


@pytest.mark.parametrize(
    ("num_streams", "num_rounds"), [(60, 5), pytest.param(200, 50, marks=pytest.mark.slow)], ids=["60", "200"]
)
def test_2_3_10_a_storm_of_disconnects_leaves_nothing_behind(
    server: ThreadServer, num_streams: int, num_rounds: int
) -> None:
    process = psutil.Process()

    async def storm(chance: random.Random, most_descriptors: int) -> tuple[int, int]:
        await asyncio.gather(*(leave_at(server, chance) for _ in range(num_streams)))
        await eventually(lambda: server.llm.load.num_unfinished == 0, "requests are left")
        await eventually(lambda: server.num_used_blocks() == 0, "blocks are left")
        await eventually(lambda: server.service.num_open == 0, "HTTP requests are left")
        assert server.num_open_streams() == 0
        assert server.service.flow.reserved_requests == server.service.flow.reserved_tokens == 0
        await eventually(lambda: process.num_fds() <= most_descriptors, "descriptors are left")
        gc.collect()
        return process.num_fds(), process.memory_info().rss

    num_fds, _ = run(storm(random.Random(0), 10**6))
    sizes = [run(storm(random.Random(seed), num_fds))[1] for seed in range(1, num_rounds)]
    assert growth(sizes) < MOST_GROWTH


def growth(sizes: list[int]) -> int:
    """Bytes, once everything has been used: the first half warms up."""
    return sizes[-1] - sizes[len(sizes) // 2]


# ---- Clients that do not read ----------------------------------------------------------------------------------------

WIDE: dict[str, object] = {
    **BODY, "prompt": "hi the", "max_tokens": 240, "n": 8, "logprobs": 10, "temperature": 1.0, "stream": True
}  # fmt: skip


@pytest.fixture(scope="module")
def impatient(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    """One that waits for slow readers for half a second."""
    overrides = ("server.slow_reader_timeout=0.5", "scheduler.max_num_seqs=64", "kv_cache.num_blocks=2048")
    with running_server(overrides, model=tiny_llama_dir) as running:
        yield running


async def sip(stream: RawStream) -> None:
    """Read a byte now and then."""
    with contextlib.suppress(ConnectionResetError):
        while await stream.reader.read(1):
            await asyncio.sleep(0.02)


async def is_cut_off(stream: RawStream) -> bool:
    """Whether the connection ends without the end of the stream."""
    try:
        content = await stream.reader.read()
    except ConnectionResetError:
        return True
    return not content.endswith(b"0\r\n\r\n")


@pytest.mark.parametrize(
    ("num_slow", "sips"),
    [(3, False), pytest.param(20, True, marks=pytest.mark.slow)],
    ids=["nothing", "a byte now and then"],
)
def test_2_3_12_clients_that_hardly_read_are_cut_off_and_the_others_get_all_of_theirs(
    impatient: ThreadServer, num_slow: int, sips: bool
) -> None:
    async def slow() -> bool:
        async with post(impatient.url, WIDE, receive_buffer=2048) as stream:
            sipping = asyncio.create_task(sip(stream)) if sips else None
            await eventually(lambda: impatient.llm.load.num_unfinished > 0, "never ran")
            await eventually(lambda: impatient.service.num_open == 0, "slow readers are still served")
            if sipping is not None:
                sipping.cancel()
            return await is_cut_off(stream)

    async def main() -> None:
        others = asyncio.create_task(check_streams(impatient, 8))
        assert all(await asyncio.gather(*(slow() for _ in range(num_slow))))
        await others

    run(main())


def test_d20_a_client_that_reads_late_gets_all_of_it_in_fewer_and_longer_chunks(server: ThreadServer) -> None:
    wide = {**WIDE, "temperature": 0}

    async def main() -> None:
        expected = await stream_all(server.url, wide)
        num_ended = server.llm.load.num_ended
        async with post(server.url, wide, receive_buffer=2048) as stream:
            await eventually(lambda: server.llm.load.num_ended == num_ended + 8, "a slow reader holds up its request")
            await stream.read_head()
            events = [event async for event in stream.events()]
        assert tokens_of(events) == tokens_of(expected)
        assert len(events) < 8 * 240 / 2

    run(main())


def tokens_of(events: list[str]) -> dict[int, list[str]]:
    """By choice."""
    assert events[-1] == "[DONE]"
    tokens: dict[int, list[str]] = {}
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            tokens.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"])
    return tokens


# ---- As it is run ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_2_3_10_a_storm_against_a_server_with_its_engine_in_a_process_leaves_nothing_behind(
    tiny_llama_dir: Path,
) -> None:
    async def leave(url: str, chance: random.Random) -> None:
        async with post(url, {**BODY, "prompt": "hi the", "max_tokens": 200, "stream": True}) as stream:
            if chance.random() < 0.7:
                await stream.read_head()
                events = stream.events()
                for _ in range(chance.choice([0, 1, 5, 20])):
                    await anext(events, None)
            stream.drop(abruptly=chance.random() < 0.5)

    def gauge(name: str) -> float:
        lines = [line for line in running.get("/metrics")[1].splitlines() if line.startswith(f"tokenyard:{name}{{")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def is_idle() -> bool:
        names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
        return all(gauge(name) == 0 for name in names)

    async def storm(seed: int) -> None:
        chance = random.Random(seed)
        await asyncio.gather(*(leave(running.url, chance) for _ in range(200)))
        await eventually(is_idle, "requests are left")

    with server_process([str(tiny_llama_dir), "kv_cache.num_blocks=256", "model.dtype=float32"]) as running:
        process = psutil.Process(running.process.pid)
        run(storm(0))
        num_fds = process.num_fds()
        sizes = []
        for seed in range(1, 30):
            run(storm(seed))
            sizes.append(process.memory_info().rss)
        run(eventually(lambda: process.num_fds() <= num_fds, "descriptors are left"))
        assert growth(sizes) < MOST_GROWTH
        assert "ERROR" not in running.log
