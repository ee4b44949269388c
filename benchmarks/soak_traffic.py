"""The clients of the soak: requests of every kind, each of which knows what must come back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import socket
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from soak_model import MAX_LENGTH
from tokenyard.client.failures import RemoteError

if TYPE_CHECKING:
    from tokenyard.client.chunks import Chunk
    from tokenyard.client.connection import Connection

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
WORDS = ("river", "stone", "seven", "cold", "a", "of", "the", "over", "green", "and", "if", "machine", "1969", "ü")
STOPS = ("er", " st", "a", "\n")
REASONS = {"stop", "length"}
BUSY = 503
MOST_TOKENS = 48  # that a choice may have
REQUEST_SECONDS = 120.0  # liveness only: none may hang
_TINY_WINDOW = 4096  # bytes that a slow reader's socket holds

Body = dict[str, object]


class UnexpectedError(Exception):
    """An answer is not what it has to be."""


@dataclass(frozen=True, slots=True)
class Reference:
    """A prompt and what greedy decoding makes of it."""

    prompt: Sequence[int]
    text: str
    num_tokens: int


@dataclass(slots=True)
class Seen:
    """What the clients have seen so far."""

    outcomes: Counter[str] = field(default_factory=Counter)  # "KIND: what became of it"
    problems: list[str] = field(default_factory=list)
    gaps: list[tuple[float, float]] = field(default_factory=list)  # (when, seconds since the stream's last token)
    num_checked: int = 0  # answers that were compared with the reference
    num_ended: int = 0  # requests


@dataclass(slots=True)
class Traffic:
    """Sends requests to one server. All choices come from `numbers`: the same seed asks for the same."""

    connection: Connection
    model: str
    references: Sequence[Reference]
    numbers: random.Random
    seen: Seen

    async def one(self) -> None:
        """One request of a random kind, with its answer checked. Never raises for what the server does."""
        kind = self.numbers.choices(list(KINDS), [weight for weight, _ in KINDS.values()])[0]
        try:
            async with asyncio.timeout(REQUEST_SECONDS):
                outcome = await KINDS[kind][1](self)
        except RemoteError as error:
            outcome = "busy" if error.status == BUSY else "failed"
            if outcome == "failed":
                self.seen.problems.append(f"{kind}: {error}")
        except (UnexpectedError, TimeoutError, OSError, asyncio.IncompleteReadError) as error:
            outcome = "failed"
            self.seen.problems.append(f"{kind}: {type(error).__name__}: {error}")
        self.seen.outcomes[f"{kind}: {outcome}"] += 1
        self.seen.num_ended += 1

    # Requests

    def text(self, most: int = 120) -> str:
        return " ".join(self.numbers.choices(WORDS, k=self.numbers.randint(1, most)))

    def body(self, **more: object) -> Body:
        """Half of them greedy, the others sampled, some with penalties."""
        own: Body = {"model": self.model, "max_tokens": self.numbers.randint(1, MOST_TOKENS)}
        if self.numbers.random() < 0.5:
            own["temperature"] = 0
        else:
            own |= {"temperature": 1.2, "top_p": 0.9, "seed": self.numbers.randrange(2**31)}
        if self.numbers.random() < 0.2:
            own |= {"presence_penalty": 0.5, "frequency_penalty": 0.2}
        return own | more

    def chat(self, **more: object) -> Body:
        messages = [{"role": "user", "content": self.text()}]
        if self.numbers.random() < 0.3:
            messages = [*messages, {"role": "assistant", "content": self.text(20)}, *messages]
        return self.body(messages=messages, **more)

    async def answer(self, path: str, body: Body, num_choices: int) -> list[Mapping[str, object]]:
        """The choices of an answer that is whole."""
        found = await self.connection.json("POST", path, body)
        choices = found.get("choices") if isinstance(found, Mapping) else None
        if not isinstance(choices, list) or len(choices) != num_choices:
            raise UnexpectedError(f"{num_choices} choices were asked for: {str(found)[:300]}")
        if wrong := [one for one in choices if one["finish_reason"] not in REASONS]:
            raise UnexpectedError(f"a choice ended with {wrong[0]['finish_reason']!r}")
        return choices

    async def streamed(self, path: str, body: Body, num_choices: int = 1, *, is_timed: bool = False) -> dict[int, str]:
        """The text of each choice of a stream, which must end each of them once and count as it should."""
        told: Body = {"stream": True, "stream_options": {"include_usage": True}}
        texts = dict.fromkeys(range(num_choices), "")
        ends: Counter[int] = Counter()
        usage, last = None, 0.0
        async with contextlib.aclosing(self.stream(path, {**body, **told})) as chunks:
            async for chunk in chunks:
                now, usage = time.monotonic(), chunk.usage or usage
                for choice in chunk.choices:
                    texts[choice.index] += choice.added
                    ends[choice.index] += choice.finish_reason is not None
                if is_timed and last and chunk.choices:
                    self.seen.gaps.append((now, now - last))
                last = now if chunk.choices else last
        if ends != Counter(range(num_choices)):
            raise UnexpectedError(f"{num_choices} choices ended so often: {dict(ends)}")
        if usage is None or not num_choices <= usage.completion_tokens <= num_choices * int(str(body["max_tokens"])):
            raise UnexpectedError(f"{usage} for {num_choices} choices of at most {body['max_tokens']} tokens")
        return texts

    def stream(self, path: str, body: Body) -> AsyncGenerator[Chunk, None]:
        return self.connection.stream(path, json.dumps(body).encode())

    async def refused(self, body: Body | bytes, status: int, path: str = COMPLETIONS) -> str:
        """An answer of this status, in OpenAI's form."""
        sent = body if isinstance(body, bytes) else json.dumps(body).encode()
        answer = await self.connection.request("POST", path, sent)
        if answer.status not in (status, BUSY):
            raise UnexpectedError(f"{status} was due, {answer.status} came: {answer.body[:300]!r}")
        if not json.loads(answer.body)["error"]["message"]:
            raise UnexpectedError(f"an error without a message: {answer.body[:300]!r}")
        return str(answer.status)


# ---- The kinds -------------------------------------------------------------------------------------------------------


async def _chat(traffic: Traffic) -> str:
    await traffic.answer(CHAT, traffic.chat(), 1)
    return "whole"


async def _chat_stream(traffic: Traffic) -> str:
    await traffic.streamed(CHAT, traffic.chat(), is_timed=True)
    return "whole"


async def _completion(traffic: Traffic) -> str:
    prompts = [traffic.text() for _ in range(traffic.numbers.randint(1, 3))]
    await traffic.answer(COMPLETIONS, traffic.body(prompt=prompts, echo=traffic.numbers.random() < 0.2), len(prompts))
    return "whole"


async def _completion_stream(traffic: Traffic) -> str:
    await traffic.streamed(COMPLETIONS, traffic.body(prompt=traffic.text()), is_timed=True)
    return "whole"


async def _several(traffic: Traffic) -> str:
    n = traffic.numbers.randint(2, 4)
    if traffic.numbers.random() < 0.5:
        await traffic.streamed(COMPLETIONS, traffic.body(prompt=traffic.text(40), n=n), n)
    else:
        await traffic.answer(CHAT, traffic.chat(n=n), n)
    return "whole"


async def _stops(traffic: Traffic) -> str:
    stops = traffic.numbers.sample(STOPS, 2)
    body = traffic.body(prompt=traffic.text(), stop=stops)
    if traffic.numbers.random() < 0.5:
        text = (await traffic.streamed(COMPLETIONS, body))[0]
    else:
        text = str((await traffic.answer(COMPLETIONS, body, 1))[0]["text"])
    if any(stop in text for stop in stops):
        raise UnexpectedError(f"{text!r} has one of {stops}")
    return "whole"


async def _logprobs(traffic: Traffic) -> str:
    if traffic.numbers.random() < 0.5:
        (choice,) = await traffic.answer(CHAT, traffic.chat(logprobs=True, top_logprobs=3), 1)
    else:
        body = traffic.body(prompt=traffic.text(30), logprobs=2, echo=traffic.numbers.random() < 0.3)
        (choice,) = await traffic.answer(COMPLETIONS, body, 1)
    if not choice["logprobs"]:
        raise UnexpectedError("no logprobs came")
    return "whole"


async def _leave_stream(traffic: Traffic) -> str:
    """The client leaves after some chunks."""
    body, n = traffic.body(prompt=traffic.text(), n=traffic.numbers.choice((1, 1, 3)), stream=True), 0
    leaves = traffic.numbers.randint(0, 20)
    async with contextlib.aclosing(traffic.stream(COMPLETIONS, body)) as chunks:
        async for _ in chunks:
            n += 1
            if n > leaves:
                return "left"
    return "whole"


async def _leave_answer(traffic: Traffic) -> str:
    """The client leaves at any time: before it is let in, while its request waits, or while it runs."""
    try:
        async with asyncio.timeout(traffic.numbers.random() * 0.3):
            await traffic.answer(CHAT, traffic.chat(), 1)
    except TimeoutError:
        return "left"
    return "whole"


async def _deadline(traffic: Traffic) -> str:
    """It has too little time, or just enough."""
    body = traffic.body(prompt=traffic.text(), timeout=traffic.numbers.choice((0.001, 0.05, 0.2)))
    answer = await traffic.connection.request("POST", COMPLETIONS, json.dumps(body).encode())
    if answer.status not in (200, 504, BUSY):
        raise UnexpectedError(f"a deadline ended with {answer.status}: {answer.body[:300]!r}")
    return str(answer.status)


async def _slow_reader(traffic: Traffic) -> str:
    """Much text, which the client takes in small pieces with pauses, or after some time not at all."""
    body = traffic.body(prompt=traffic.text(20), n=2, logprobs=5, stream=True, ignore_eos=True)
    pieces = traffic.numbers.choice((3, 1_000_000))
    async with raw_post(traffic.connection.endpoint.root, COMPLETIONS, body) as reader:
        for _ in range(pieces):
            data = await reader.read(1024)
            if not data:
                return "whole"
            if b"[DONE]" in data:
                return "whole"
            await asyncio.sleep(0.005)
        await asyncio.sleep(0.5)
    return "left"


async def _refused(traffic: Traffic) -> str:
    """What cannot be served."""
    long = [traffic.numbers.randrange(1000) for _ in range(MAX_LENGTH + 1)]
    wrong: list[tuple[Body | bytes, int, str]] = [
        (traffic.body(prompt=long), 400, COMPLETIONS),
        (traffic.body(prompt="x " * 4 * MAX_LENGTH), 400, COMPLETIONS),
        (traffic.chat(tools=[{"type": "function", "function": {"name": "f"}}]), 400, CHAT),
        (traffic.body(prompt=""), 400, COMPLETIONS),
        (traffic.body(prompt="x", temperature=-1), 400, COMPLETIONS),
        (traffic.body(prompt="x", logprobs=10**6), 400, COMPLETIONS),
        (traffic.body(prompt="x", model="nobody"), 404, COMPLETIONS),
        (b'{"prompt": ', 400, COMPLETIONS),
        (traffic.body(prompt="x"), 404, "/v1/nothing"),
    ]
    body, status, path = traffic.numbers.choice(wrong)
    return await traffic.refused(body, status, path)


async def _reference(traffic: Traffic) -> str:
    """Greedy, with a known answer."""
    known = traffic.numbers.choice(traffic.references)
    body: Body = {
        "model": traffic.model,
        "prompt": list(known.prompt),
        "max_tokens": known.num_tokens,
        "temperature": 0,
        "ignore_eos": True,
    }
    if traffic.numbers.random() < 0.5:
        text = (await traffic.streamed(COMPLETIONS, body))[0]
    else:
        text = str((await traffic.answer(COMPLETIONS, body, 1))[0]["text"])
    traffic.seen.num_checked += 1
    if text != known.text:
        raise UnexpectedError(f"greedy decoding gave {text!r}, not {known.text!r}")
    return "whole"


KINDS: Mapping[str, tuple[int, Callable[[Traffic], Awaitable[str]]]] = {
    "chat": (12, _chat),
    "chat stream": (18, _chat_stream),
    "completion": (10, _completion),
    "completion stream": (18, _completion_stream),
    "n above 1": (8, _several),
    "stop strings": (6, _stops),
    "logprobs": (6, _logprobs),
    "left stream": (8, _leave_stream),
    "left answer": (6, _leave_answer),
    "deadline": (4, _deadline),
    "slow reader": (3, _slow_reader),
    "refused": (6, _refused),
    "reference": (8, _reference),
}
"""What is asked for: a weight, and the request."""


@contextlib.asynccontextmanager
async def raw_post(root: str, path: str, body: Body) -> AsyncGenerator[asyncio.StreamReader, None]:
    """A connection whose receiving side holds next to nothing; at the end it is cut."""
    parts = urlsplit(root)
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _TINY_WINDOW)
    raw.setblocking(False)
    await asyncio.get_running_loop().sock_connect(raw, (parts.hostname, parts.port))
    reader, writer = await asyncio.open_connection(sock=raw, limit=_TINY_WINDOW)
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {parts.netloc}\r\nContent-Type: application/json\r\n"
    try:
        writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
        yield reader
    finally:
        writer.transport.abort()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
