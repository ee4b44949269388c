"""Logprobs as the chat endpoint has them: one entry for each token of the answer, with its alternatives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from tokenyard.server.logprobs import token_name

if TYPE_CHECKING:
    from tokenyard.outputs import CompletionOutput, Logprob, LogprobsOfPosition


class TopLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """A token that might have stood there. Its `bytes` need not be whole characters; then `token` spells them."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob, frozen=True, kw_only=True):
    """The token that does stand there, and the most likely ones, most likely first; it may be one of them."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True, kw_only=True):
    """Of some tokens of one choice."""

    content: list[TokenLogprob]
    refusal: None = None


def chat_logprobs(
    output: CompletionOutput, num_alternatives: int, *, as_token_ids: bool = False
) -> ChatLogprobs | None:
    """An entry for each of the output's tokens, end-of-sequence and stop tokens included; None if it has no logprobs.

    With `as_token_ids` a token is called `token_id:N`.
    """
    if output.logprobs is None:
        return None
    return ChatLogprobs(
        content=[
            _entry(token_id, position, num_alternatives, as_token_ids)
            for token_id, position in zip(output.token_ids, output.logprobs, strict=True)
            if position  # a request that failed in a step has none for it
        ]
    )


def _entry(token_id: int, position: LogprobsOfPosition, num_alternatives: int, as_token_ids: bool) -> TokenLogprob:
    own = position[token_id]
    data = own.token_bytes or b""
    return TokenLogprob(
        token=token_name(token_id, data, as_token_ids),
        logprob=own.logprob,
        bytes=list(data),
        top_logprobs=[
            _alternative(other, logprob, as_token_ids) for other, logprob in _likeliest(position, num_alternatives)
        ],
    )


def _alternative(token_id: int, logprob: Logprob, as_token_id: bool) -> TopLogprob:
    data = logprob.token_bytes or b""
    return TopLogprob(token=token_name(token_id, data, as_token_id), logprob=logprob.logprob, bytes=list(data))


def _likeliest(position: LogprobsOfPosition, count: int) -> Sequence[tuple[int, Logprob]]:
    """The `count` most likely tokens. The engine puts the position's own token first, and adds it where it is none."""
    entries = list(position.items())
    if len(entries) > count:
        return entries[1:]
    return sorted(entries, key=lambda entry: -entry[1].logprob)
