"""`tokenyard chat --url URL`: a conversation with any server of OpenAI's API; no model is loaded here."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

import msgspec

from tokenyard.cli.conversation import Conversation, converse
from tokenyard.cli.sampling_flags import PARAMETERS
from tokenyard.cli.terminal import say
from tokenyard.client.connection import Connection, connect
from tokenyard.client.endpoint import find_endpoint
from tokenyard.client.failures import RemoteError
from tokenyard.client.models import choose_model, list_models
from tokenyard.errors import UserError
from tokenyard.launch.flags import Flagged

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenyard.cli.arguments import Given

_CHAT, _COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def chat_with_server(given: Given) -> int:
    """The command, parsed. Raises UserError and RemoteError where it cannot begin."""
    endpoint, name = find_endpoint(given.flags.url, "--url"), _model(given)
    with asyncio.Runner() as runner:
        connection = runner.run(connect(endpoint, is_verified=not given.flags.insecure))
        try:
            model = choose_model(runner.run(list_models(connection)), name, endpoint.root)
            conversation = ServerConversation(
                runner, connection, _fields(given, model), system=given.flags.system, raw=given.flags.raw
            )
            return 0 if converse(conversation, f"{model} at {endpoint.root}") else 1
        finally:
            runner.run(connection.close())


def _model(given: Given) -> str | None:
    """The name that was given; everything else that is for an engine is refused."""
    for override in given.overrides:
        if isinstance(override, Flagged) and override.flag == "--model":
            continue
        text = override.flag if isinstance(override, Flagged) else override
        raise UserError(f"{text} is for an engine, and with --url the server has one of its own; remove it")
    if given.config_file is not None:
        raise UserError("--config is for an engine, and with --url the server has one of its own; remove it")
    flag: str | None = given.flags.engine_model
    names = [*([] if flag is None else [flag]), *given.words]
    if len(names) > 1:
        raise UserError(f"more than one model is given: {', '.join(names)}; a chat is with one")
    return names[0] if names else None


def _fields(given: Given, model: str) -> dict[str, object]:
    """What every request of the conversation has; parameters that were not given are the server's to choose."""
    flags = vars(given.flags)
    sampling = {name: value for name in PARAMETERS if (value := flags.get(name)) is not None and value is not False}
    return {"model": model, "stream": True, **sampling}


class ServerConversation(Conversation):
    """With a server; a turn that fails leaves the messages as they were, of one that Ctrl-C ends its text is kept."""

    def __init__(
        self,
        runner: asyncio.Runner,
        connection: Connection,
        fields: Mapping[str, object],
        *,
        system: str | None,
        raw: bool,
    ) -> None:
        super().__init__(system)
        self._runner = runner
        self._connection = connection
        self._fields = fields
        self._raw = raw

    def say(self, text: str) -> bool:
        asked = self._asked(text)
        pieces: list[str] = []
        finish_reason = None
        try:
            body: dict[str, object] = {"prompt": text} if self._raw else {"messages": asked}
            finish_reason = self._runner.run(self._answer(body, pieces))
        except KeyboardInterrupt:  # the request has been ended
            print()
        except RemoteError as error:
            if pieces:
                print()
            say(f"error: {error} (/reset starts over)")
            return False
        else:
            print()
        if finish_reason == "length":
            say("(cut: --max-tokens allows more)")
        if pieces:
            self._keep(asked, "".join(pieces))
        return True

    async def _answer(self, asked: Mapping[str, object], pieces: list[str]) -> str | None:
        """Print the answer; its text is left in `pieces`, however it ends. Returns the finish reason."""
        body = msgspec.json.encode({**self._fields, **asked})
        finish_reason = None
        async with contextlib.aclosing(self._connection.stream(_COMPLETIONS if self._raw else _CHAT, body)) as chunks:
            async for chunk in chunks:
                for choice in chunk.choices[:1]:
                    if choice.added:
                        pieces.append(choice.added)
                        print(choice.added, end="", flush=True)
                    finish_reason = choice.finish_reason or finish_reason
        return finish_reason
