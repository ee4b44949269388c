"""Logprobs as the completions endpoint has them: OpenAI's older form, four lists as long as there are tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from tokenyard.model.tokenizer import Tokenizer
    from tokenyard.outputs import LogprobsOfPosition

_FARTHEST = 32  # characters between a prompt's text so far and where its next token is looked for


class CompletionLogprobs(msgspec.Struct, kw_only=True):
    """Of tokens in a row. A prompt's first token has no logprob: null."""

    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]  # the most likely ones, and the token itself; by name
    text_offset: list[int]  # where each token's text begins, in characters of the choice's text

    def extend(self, others: CompletionLogprobs) -> None:
        """Take in the tokens that follow."""
        self.tokens += others.tokens
        self.token_logprobs += others.token_logprobs
        self.top_logprobs += others.top_logprobs
        self.text_offset += others.text_offset


def no_logprobs() -> CompletionLogprobs:
    """Of no tokens."""
    return CompletionLogprobs(tokens=[], token_logprobs=[], top_logprobs=[], text_offset=[])


class LogprobWriter:
    """Turns the logprobs of one choice into that form, in as many parts as they come in.

    A token is called by its text; by `bytes:\\xe4\\xbd` where it is no whole characters, and by `token_id:N` with
    `as_token_ids`. Offsets are those of the text before stop strings are cut off: whether it comes in parts or at once,
    they are the same. A token that only begins a character has the offset of that character, as has the one that
    completes it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_ids: Sequence[int],
        *,
        start: int,
        skip_special_tokens: bool = True,
        as_token_ids: bool = False,
    ) -> None:
        """`start` is the length of the text before the first sampled token: that of an echoed prompt, or 0."""
        self._tokenizer = tokenizer
        self._stream = tokenizer.new_stream(skip_special_tokens, prompt_ids)
        self._offset = start
        self._as_token_ids = as_token_ids

    def part(self, token_ids: Sequence[int], positions: Sequence[LogprobsOfPosition]) -> CompletionLogprobs:
        """Of the next sampled tokens."""
        offsets = []
        for token_id in token_ids:
            offsets.append(self._offset)
            self._offset += len(self._stream.step(token_id))
        return _written(self._tokenizer, token_ids, positions, offsets, self._as_token_ids)


def of_prompt(
    tokenizer: Tokenizer,
    text: str,
    token_ids: Sequence[int],
    positions: Sequence[LogprobsOfPosition | None],
    *,
    as_token_ids: bool,
) -> CompletionLogprobs:
    """Of a prompt's tokens, where `text` is how the prompt is shown."""
    offsets = prompt_offsets(tokenizer, text, token_ids)
    return _written(tokenizer, token_ids, positions, offsets, as_token_ids)


def _written(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    positions: Sequence[LogprobsOfPosition | None],
    offsets: list[int],
    as_token_ids: bool,
) -> CompletionLogprobs:
    """In OpenAI's form; a position without logprobs has null."""
    logprobs = no_logprobs()
    logprobs.text_offset = offsets
    for token_id, position in zip(token_ids, positions, strict=True):
        own = position.get(token_id) if position else None
        logprobs.tokens.append(token_name(token_id, tokenizer.token_bytes(token_id), as_token_ids))
        logprobs.token_logprobs.append(None if own is None else own.logprob)
        logprobs.top_logprobs.append(_by_name(position, as_token_ids) if position else None)
    return logprobs


def prompt_offsets(tokenizer: Tokenizer, text: str, token_ids: Sequence[int]) -> list[int]:
    """Where in a prompt's text each of its tokens begins.

    Tokens that are not written in the text, as a BOS that was added, have no length. Where a tokenizer changes what it
    encodes (lower case, say), the next token that can be found again sets the offset right.
    """
    stream, special_ids = tokenizer.new_stream(skip_special_tokens=True), tokenizer.special_ids
    offsets = []
    end = 0
    for token_id in token_ids:
        is_special = token_id in special_ids
        piece = tokenizer.token_bytes(token_id).decode("utf-8", "replace") if is_special else stream.step(token_id)
        place = text.find(piece, end, end + len(piece) + (0 if is_special else _FARTHEST))
        offsets.append(end if place < 0 else place)
        end = end if place < 0 else place + len(piece)
    return offsets


def token_name(token_id: int, data: bytes, as_token_id: bool = False) -> str:
    """What a token of these bytes is called."""
    if as_token_id:
        return f"token_id:{token_id}"
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _by_name(position: LogprobsOfPosition, as_token_ids: bool) -> dict[str, float]:
    """Of tokens that are called the same, the likeliest counts."""
    named: dict[str, float] = {}
    for token_id, logprob in position.items():
        name = token_name(token_id, logprob.token_bytes or b"", as_token_ids)
        named[name] = max(logprob.logprob, named.get(name, logprob.logprob))
    return named


class TokenLogprob(msgspec.Struct, frozen=True, kw_only=True):
    """One token of a position, in the form of `prompt_logprobs`."""

    logprob: float
    rank: int | None
    decoded_token: str | None


def by_token_id(
    positions: Sequence[LogprobsOfPosition | None],
) -> list[Mapping[int, TokenLogprob] | None]:
    """The answer's `prompt_logprobs`: of each prompt token, by token id; null for the first."""
    return [
        None
        if position is None
        else {
            token_id: TokenLogprob(logprob=one.logprob, rank=one.rank, decoded_token=one.decoded_token)
            for token_id, one in position.items()
        }
        for position in positions
    ]
