"""Chats over plain HTTP: what the official client would not send, and answers as they are written."""

from __future__ import annotations

import contextlib
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from http_server import DEADLINE, ThreadServer
from tokenizers import pre_tokenizers
from tokenyard.plugins import forget_plugins

PACKAGES = Path(__file__).resolve().parent.parent / "fixtures" / "packages"
SCRIPTED = "logits_processors=[script]"  # with `installed("script")`: see that package

HI, EOS = 259, 2  # ids of the tiny model: "hi" and <|im_end|>
_SPELLINGS = [*map(chr, range(33, 127)), *map(chr, range(161, 173)), *map(chr, range(174, 256))]  # of themselves
_BYTES = {ord(spelling): spelling for spelling in _SPELLINGS}

Body = dict[str, Any]


@contextlib.contextmanager
def installed(name: str) -> Iterator[None]:
    """A fixture package that looks installed."""
    folder = str(PACKAGES / name)
    sys.path.insert(0, folder)
    forget_plugins()
    try:
        yield
    finally:
        sys.path.remove(folder)
        forget_plugins()


def say(*token_ids: int) -> Body:
    """Fields with which the scripted model says these tokens."""
    return {"extra_args": {"say": list(token_ids)}}


def byte_ids(data: bytes) -> list[int]:
    """Ids of the tiny model's single bytes; of those that GPT-2 spells as the characters that they are in Latin-1."""
    order = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [3 + order.index(_BYTES[byte]) for byte in data]


def user(content: object) -> list[Body]:
    return [{"role": "user", "content": content}]


def post(server: ThreadServer, body: object, path: str = "/v1/chat/completions") -> tuple[int, str]:
    """Status and body of the answer; `body` is sent as it is if it is bytes."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    request = urllib.request.Request(server.url + path, data=data, headers={"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def chat(server: ThreadServer, messages: object = None, **fields: object) -> Body:
    """A whole answer; AssertionError for an error."""
    status, text = post(server, {"messages": user("hi") if messages is None else messages, **fields})
    assert status == 200, text
    answer: Body = json.loads(text)
    return answer


def refused(server: ThreadServer, body: object, *, status: int = 400, path: str = "/v1/chat/completions") -> Body:
    """The `error` object of a request that is refused with this status."""
    found, text = post(server, body, path)
    assert found == status, (found, text[:500])
    error: Body = json.loads(text)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["code"] == status
    assert "\n" not in error["message"]
    return error


def chunks(server: ThreadServer, messages: object = None, **fields: object) -> list[Body]:
    """The chunks of a streamed answer, which ends with [DONE]."""
    body = {"messages": user("hi") if messages is None else messages, "stream": True, **fields}
    status, text = post(server, body)
    assert status == 200, text
    *events, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def content_of(found: list[Body], index: int = 0) -> str:
    """The text of one choice of a stream."""
    return "".join(choice["delta"].get("content", "") for choice in choices_of(found, index))


def choices_of(found: list[Body], index: int = 0) -> list[Body]:
    """What the chunks say of one choice."""
    return [choice for chunk in found for choice in chunk["choices"] if choice["index"] == index]


def logprobs_of(found: list[Body], index: int = 0) -> list[Body]:
    """The entries of one choice of a stream."""
    parts = [choice["logprobs"]["content"] for choice in choices_of(found, index) if choice["logprobs"] is not None]
    return [entry for part in parts for entry in part]
