"""Requests to /v1/completions, as plain HTTP and taken apart for assertions."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import httpx
from http_server import DEADLINE, ThreadServer

Json = dict[str, Any]


def post(server: ThreadServer, path: str = "/v1/completions", /, **body: object) -> tuple[int, Json]:
    """Status and body of an answer that is no stream."""
    answer = httpx.post(server.url + path, json=body, timeout=DEADLINE)
    return answer.status_code, answer.json()


def complete(server: ThreadServer, **body: object) -> Json:
    """The body of an answer that has to be 200."""
    status, answer = post(server, **body)
    assert status == 200, answer
    return answer


def refused(server: ThreadServer, path: str = "/v1/completions", /, **body: object) -> Json:
    """The error of a request that has to be 400, in one line."""
    status, answer = post(server, path, **body)
    assert status == 400, answer
    error: Json = answer["error"]
    assert error["type"] == "BadRequestError"
    assert error["code"] == 400
    assert error["message"]
    assert "\n" not in error["message"]
    return error


def chunks(server: ThreadServer, **body: object) -> list[Json]:
    """The events of a stream, which ends with [DONE]."""
    with httpx.stream(
        "POST", server.url + "/v1/completions", json={**body, "stream": True}, timeout=DEADLINE
    ) as answer:
        answer.read()
        assert answer.status_code == 200, answer.text
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert events[-1] == "[DONE]"
    return [json.loads(event) for event in events[:-1]]


def joined(stream: Iterable[Mapping[str, Any]]) -> dict[int, Json]:
    """By index, the choices that the chunks of a stream make, in the form of an answer that is no stream.

    Checks on the way that a choice ends once, with its last chunk, and that no other chunk of it is without text.
    """
    found: dict[int, Json] = {}
    for chunk in stream:
        for part in chunk["choices"]:
            whole = found.setdefault(part["index"], {**part, "text": "", "logprobs": None, "token_ids": []})
            assert whole["finish_reason"] is None or whole["text"] == "", "a chunk after the last one"
            assert part["text"] or part["finish_reason"] is not None, "a chunk without text"
            whole["text"] += part["text"]
            whole["token_ids"] += part.get("token_ids", [])
            whole["finish_reason"], whole["stop_reason"] = part["finish_reason"], part["stop_reason"]
            if part["logprobs"] is not None:
                whole["logprobs"] = extended(whole["logprobs"], part["logprobs"])
    return found


def extended(whole: Json | None, part: Mapping[str, Sequence[object]]) -> Json:
    """Logprobs with those that follow."""
    return {name: [*(whole[name] if whole else []), *values] for name, values in part.items()}
