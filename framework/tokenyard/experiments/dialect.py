"""Dialect: how a server of OpenAI's API takes the requests of a workload, found out by asking it."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from tokenyard.client.failures import RemoteError
from tokenyard.client.models import is_tokenyard

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.client.connection import Connection
    from tokenyard.interfaces.workload import WorkloadRequest

_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_NOT_ABOUT_THE_BODY = (401, 403, 429, 503)  # statuses: another body would fare no better
_PROBE_IDS = (300, 301, 302, 303)
_PROBE_TEXT = "the one that was"


class Dialect(NamedTuple):
    """What its requests look like."""

    model: str
    route: str = _COMPLETIONS
    sends_ids: bool = True  # prompts are token ids; else text of about as many tokens
    ignores_eos: bool = True  # answers are as long as asked; else the model may end them before
    takes_hints: bool = False  # Tokenyard's own: session, priority, deadline

    def body(self, prompt: Sequence[int] | str, request: WorkloadRequest, deadline: float | None) -> bytes:
        """`deadline`: seconds from now."""
        body: dict[str, object] = {"model": self.model, "temperature": 0.0}
        if self.route == _CHAT:
            body |= {"messages": [{"role": "user", "content": prompt}]}
            body["max_completion_tokens"] = request.num_output_tokens
        else:
            body |= {"prompt": prompt, "max_tokens": request.num_output_tokens}
        if self.ignores_eos:
            body["ignore_eos"] = True
        if request.client is not None:
            body["user"] = request.client
        if self.takes_hints:
            body |= _hints(request, deadline)
        return msgspec.json.encode(body | {"stream": True, "stream_options": {"include_usage": True}})

    @property
    def facts(self) -> dict[str, object]:
        return {
            "model": self.model,
            "route": self.route,
            "prompts": "token_ids" if self.sends_ids else "text",
            "ignore_eos": self.ignores_eos,
            "scheduling_hints": self.takes_hints,
        }


def _hints(request: WorkloadRequest, deadline: float | None) -> dict[str, object]:
    hints: dict[str, object] = {"return_token_ids": True, "priority": request.priority}
    if request.session is not None:
        hints["session_id"] = request.session
    if deadline is not None:
        hints["scheduling"] = {"deadline": max(deadline, 1e-3)}
    return hints


def dialects(model: str, *, is_ours: bool) -> list[Dialect]:
    """The best one first."""
    return [
        Dialect(model, takes_hints=is_ours),
        Dialect(model, takes_hints=is_ours, sends_ids=False),
        Dialect(model, ignores_eos=False),
        Dialect(model, sends_ids=False, ignores_eos=False),
        Dialect(model, _CHAT, sends_ids=False),
        Dialect(model, _CHAT, sends_ids=False, ignores_eos=False),
    ]


async def find_dialect(connection: Connection, model: str, probe: WorkloadRequest) -> Dialect:
    """The first that the server takes: a small request is sent in each. Raises RemoteError where it takes none."""
    found = dialects(model, is_ours=await is_tokenyard(connection))
    refusal: RemoteError | None = None
    for dialect in found:
        prompt = list(_PROBE_IDS[: probe.num_prompt_tokens]) if dialect.sends_ids else _PROBE_TEXT
        try:
            await ask(connection, dialect, dialect.body(prompt, probe, None))
        except RemoteError as error:
            if error.status is None or error.status in _NOT_ABOUT_THE_BODY:
                raise
            refusal = refusal or error
        else:
            return dialect
    raise refusal or RemoteError("no request was sent")


async def ask(connection: Connection, dialect: Dialect, body: bytes) -> None:
    """Send a request and hear its answer out."""
    async with contextlib.aclosing(connection.stream(dialect.route, body)) as chunks:
        async for _ in chunks:
            pass
