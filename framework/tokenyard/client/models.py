"""Which models a server has, and waiting for it to say so."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tokenyard.client.failures import RemoteError
from tokenyard.errors import UserError

if TYPE_CHECKING:
    from tokenyard.client.connection import Connection

_POLL_SECONDS = 0.25


async def list_models(connection: Connection, wait: float = 0.0) -> list[str]:
    """The names in /v1/models; asked again for `wait` seconds while the server cannot answer."""
    deadline = time.monotonic() + wait
    while True:
        try:
            return _names(await connection.json("GET", "/v1/models"))
        except RemoteError as error:
            is_starting = error.status is None or error.status >= 500
            if not is_starting or time.monotonic() >= deadline:
                raise
        await asyncio.sleep(_POLL_SECONDS)


async def is_tokenyard(connection: Connection) -> bool:
    """Whether its models say that they are served by Tokenyard."""
    return "tokenyard" in _told(await connection.json("GET", "/v1/models"), "owned_by")


def choose_model(names: Sequence[str], name: str | None, server: str) -> str:
    """The model that requests name: `name`, or the first one. Raises UserError where the server has no such model."""
    if name is None and not names:
        raise UserError(f"{server} tells no model in /v1/models; give --model")
    if name is None:
        return names[0]
    if names and name not in names:
        raise UserError(f"{server} has no model '{name}'; there is: {', '.join(names[:20])}")
    return name


def _names(answer: object) -> list[str]:
    return _told(answer, "id")


def _told(answer: object, key: str) -> list[str]:
    """What its cards say under a key, where that is text."""
    cards = answer.get("data") if isinstance(answer, Mapping) else None
    found = [card.get(key) for card in cards if isinstance(card, Mapping)] if isinstance(cards, list) else []
    return [value for value in found if isinstance(value, str)]
