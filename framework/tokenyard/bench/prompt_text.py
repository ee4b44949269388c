"""Prompts of token ids as text, for requests that carry text: by a tokenizer here, or by the server's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from tokenyard.client.failures import RemoteError
from tokenyard.errors import UserError
from tokenyard.model.files import resolve_model
from tokenyard.model.tokenizer import load_tokenizer

if TYPE_CHECKING:
    from tokenyard.client.connection import Connection
    from tokenyard.model.tokenizer import Tokenizer

_TRIES = 4  # until a text has as many tokens as it was made of
_AT_ONCE = 32  # requests to a server


def local_tokenizer(name: str, on_progress: Callable[[str], None]) -> Tokenizer:
    """The tokenizer of a model as `tokenyard serve` takes it. Raises ModelLoadError."""
    return load_tokenizer(resolve_model(name, on_progress, weights=False))


def write_texts(tokenizer: Tokenizer, prompts: Sequence[Sequence[int]]) -> list[str]:
    """A text of each, with as many tokens where that can be had: random tokens side by side may read as others."""
    return [_write(tokenizer, prompt) for prompt in prompts]


def _write(tokenizer: Tokenizer, prompt: Sequence[int]) -> str:
    tokens = list(prompt)
    text = tokenizer.decode(tokens)
    for _ in range(_TRIES):
        found = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
        if len(found) == len(prompt):
            break
        missing = len(prompt) - len(found)
        tokens = found + tokens[:missing] if missing > 0 else found[: len(prompt)]
        text = tokenizer.decode(tokens)
    return text


async def ask_texts(connection: Connection, model: str, prompts: Sequence[Sequence[int]]) -> list[str]:
    """The server's own text of each. Raises UserError where it does not tell."""
    slots = asyncio.Semaphore(_AT_ONCE)

    async def ask(prompt: Sequence[int]) -> str:
        async with slots:
            answer = await connection.json("POST", "/detokenize", {"model": model, "tokens": list(prompt)})
        text = answer.get("prompt") if isinstance(answer, Mapping) else None
        if not isinstance(text, str):
            raise RemoteError("/detokenize answered without a prompt")
        return text

    try:
        return list(await asyncio.gather(*map(ask, prompts)))
    except RemoteError as error:
        raise UserError(f"prompts cannot be written as text: {error}; give --tokenizer MODEL") from error
