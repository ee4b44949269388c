"""TokenBytes: the bytes that each token adds to a text."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.model.token_spelling import spelling_of

if TYPE_CHECKING:
    import tokenizers

_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_END_OF_IDS = 2**32  # the library takes no larger ones
_UNCHANGED_BYTES = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))


class TokenPiece(NamedTuple):
    """What one token adds to a text."""

    data: bytes  # UTF-8, perhaps a part of a character
    is_byte: bool  # one byte of a character that has no token of its own
    first: bytes  # instead of `data`, when no token stands before it


class TokenBytes:
    """A tokenizer's pieces, each worked out when it is first asked for. Safe to share between threads.

    `spelling` is None for a decoder whose text of a token depends on its neighbours (WordPiece, `</w>` endings, ...):
    a piece is then what the token is when it stands alone.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_ids: frozenset[int]) -> None:
        self._backend = backend
        self._special_ids = special_ids
        self.spelling = spelling_of(_decoder_state(backend))
        self._pieces: Mapping[bool, dict[int, TokenPiece | None]] = {True: {}, False: {}}
        self._whole_texts: Mapping[bool, dict[int, str]] = {True: {}, False: {}}

    def piece(self, token_id: int, *, skip_special_tokens: bool = False) -> TokenPiece | None:
        """None for what decoding passes over: an id without a token and, if so wanted, a special token."""
        known = self._pieces[skip_special_tokens]
        if token_id not in known:
            is_skipped = skip_special_tokens and token_id in self._special_ids
            token = self._backend.id_to_token(token_id) if 0 <= token_id < _END_OF_IDS and not is_skipped else None
            piece = known[token_id] = None if token is None else self._piece_of(token, token_id)
            text = "" if piece is None else _whole_text(piece.data)
            if text is not None:
                self._whole_texts[skip_special_tokens][token_id] = text
        return known[token_id]

    def whole_texts(self, *, skip_special_tokens: bool) -> Mapping[int, str]:
        """Token id -> text, of those that `piece` was asked for and that begin and end with a character."""
        return self._whole_texts[skip_special_tokens]

    def _piece_of(self, token: str, token_id: int) -> TokenPiece:
        spelling = self.spelling
        if spelling is None:
            alone = self._backend.decode([token_id], skip_special_tokens=False).encode()
            return TokenPiece(alone, is_byte=False, first=alone)
        if spelling.is_byte_level:
            data = _unescaped(token)
            return TokenPiece(data, is_byte=False, first=data)
        first = None if spelling.dropped_from_first is None else token.replace(spelling.dropped_from_first, "")
        for pattern, content in spelling.replacements:
            token = token.replace(pattern, content)
        if spelling.has_byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            byte = bytes.fromhex(match[1])
            return TokenPiece(byte, is_byte=True, first=byte)
        return TokenPiece(token.encode(), is_byte=False, first=(token if first is None else first).encode())


def _whole_text(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _unescaped(token: str) -> bytes:
    """The bytes of a byte-level token; one with a character that stands for no byte is text as it is written."""
    table = byte_of_character()
    try:
        return bytes(table[character] for character in token)
    except KeyError:
        return token.encode()


def _decoder_state(backend: tokenizers.Tokenizer) -> object:
    decoder = backend.decoder
    # What pickle would take of a decoder is its part of tokenizer.json; writing all of that takes far longer.
    return None if decoder is None else json.loads(decoder.__getstate__())


@cache
def byte_of_character() -> Mapping[str, int]:
    """GPT-2's alphabet: visible Latin-1 characters stand for themselves, U+0100 and up for the other bytes in order."""
    others = [value for value in range(0x100) if value not in _UNCHANGED_BYTES]
    return {chr(value): value for value in _UNCHANGED_BYTES} | {
        chr(0x100 + place): value for place, value in enumerate(others)
    }
