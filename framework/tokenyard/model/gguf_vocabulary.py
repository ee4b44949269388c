"""The vocabulary in a GGUF file's metadata: tokens, their types, scores, merges and special ids, all checked.

Nothing here is taken on trust: every list has the length it must have, every id is in the vocabulary, every merge makes
a token of tokens, so that what is built from it can neither fail later nor point outside.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING

from tokenyard.errors import ModelLoadError
from tokenyard.model.gguf_metadata import Metadata

if TYPE_CHECKING:
    from tokenyard.model.gguf_reader import GGUFHeader

SENTENCEPIECE, BYTE_LEVEL = "llama", "gpt2"  # values of tokenizer.ggml.model
MAX_TOKEN_CHARACTERS = 1024
_PREFIX, _ID_SUFFIX = "tokenizer.ggml.", "_token_id"
_SHORT_NAMES = {"unknown": "unk", "padding": "pad"}
_SENTENCEPIECE_IDS = {"unk": 0, "bos": 1, "eos": 2}  # where a file does not say
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


class TokenType(IntEnum):
    """What kind of token one is, as GGUF files number it."""

    UNDEFINED = 0
    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocabulary:
    """A checked vocabulary; the place of a token in `tokens` is its id, and no token is there twice."""

    model: str  # SENTENCEPIECE or BYTE_LEVEL
    tokens: Sequence[str]
    types: Sequence[int]  # one a token
    scores: Sequence[float]  # one a token; all 0 where the file has none
    merges: Sequence[tuple[str, str]]  # best first; empty where the file has none
    ids: dict[str, int]  # token -> id
    special: dict[str, int]  # bos, eos, unk, pad, ... -> id

    def of_type(self, *wanted: TokenType) -> list[str]:
        """The tokens of these types, by id."""
        return [token for token, kind in zip(self.tokens, self.types, strict=True) if kind in wanted]


def special_ids(keys: Metadata, vocab_size: int) -> dict[str, int]:
    """bos, eos, eot, ... -> id, of every key that names one; ModelLoadError for an id outside of the vocabulary."""
    ids = dict(_SENTENCEPIECE_IDS) if keys.text(f"{_PREFIX}model", "") == SENTENCEPIECE else {}
    ids = {name: index for name, index in ids.items() if index < vocab_size}
    for name in keys.names(_PREFIX):
        if not name.endswith(_ID_SUFFIX):
            continue
        index = keys.whole(_PREFIX + name)
        if index >= vocab_size:
            raise keys.wrong(_PREFIX + name, f"an id below {vocab_size}, the size of the vocabulary,")
        kind = name.removesuffix(_ID_SUFFIX)
        ids[_SHORT_NAMES.get(kind, kind)] = index
    return ids


def read_vocabulary(header: GGUFHeader) -> Vocabulary:
    """The file's vocabulary; ModelLoadError for one that does not hold."""
    keys = Metadata(header)
    model = keys.text(f"{_PREFIX}model")
    if model not in (SENTENCEPIECE, BYTE_LEVEL):
        raise keys.refuse(f"the tokenizer model is {model!r}", (SENTENCEPIECE, BYTE_LEVEL))
    tokens = keys.strings(f"{_PREFIX}tokens")
    ids = _ids(keys, header, tokens)
    types = _types(keys, tokens, model)
    return Vocabulary(
        model=model,
        tokens=tokens,
        types=types,
        scores=_scores(keys, len(tokens)),
        merges=_merges(keys, ids, model),
        ids=ids,
        special=special_ids(keys, len(tokens)),
    )


def _ids(keys: Metadata, header: GGUFHeader, tokens: list[str]) -> dict[str, int]:
    embedding = header.tensors.get("token_embd.weight")
    if not tokens:
        raise ModelLoadError(f"{keys.path}: the vocabulary is empty")
    if embedding is not None and len(tokens) > embedding.shape[0]:
        raise ModelLoadError(
            f"{keys.path}: the vocabulary has {len(tokens)} tokens, more tokens than embeddings ({embedding.shape[0]})"
        )
    ids: dict[str, int] = {}
    for index, token in enumerate(tokens):
        if len(token) > MAX_TOKEN_CHARACTERS:
            raise ModelLoadError(
                f"{keys.path}: token {index} has {len(token)} characters; at most {MAX_TOKEN_CHARACTERS} are read"
            )
        if token in ids:
            raise ModelLoadError(
                f"{keys.path}: the vocabulary has token {token[:40]!r} twice, as {ids[token]} and {index}"
            )
        ids[token] = index
    return ids


def _types(keys: Metadata, tokens: list[str], model: str) -> list[int]:
    key = f"{_PREFIX}token_type"
    if not keys.has(key):
        return [TokenType.BYTE if _is_byte(token, model) else TokenType.NORMAL for token in tokens]
    types = keys.numbers(key)
    if len(types) != len(tokens):
        raise keys.wrong(key, f"one entry for each of {len(tokens)} tokens")
    if not set(types) <= set(TokenType):
        raise keys.wrong(key, f"numbers from {min(TokenType):d} to {max(TokenType):d}")
    for index, (token, kind) in enumerate(zip(tokens, types, strict=True)):
        if kind == TokenType.BYTE and not _is_byte(token, model):
            raise ModelLoadError(f"{keys.path}: token {index} is a byte, but {token[:40]!r}; <0x00> to <0xFF> are read")
    return [int(kind) for kind in types]


def _is_byte(token: str, model: str) -> bool:
    return model == SENTENCEPIECE and _BYTE_TOKEN.fullmatch(token) is not None


def _scores(keys: Metadata, num_tokens: int) -> list[float]:
    key = f"{_PREFIX}scores"
    if not keys.has(key):
        return [0.0] * num_tokens
    scores = keys.numbers(key)
    if len(scores) != num_tokens:
        raise keys.wrong(key, f"one entry for each of {num_tokens} tokens")
    return scores


def _merges(keys: Metadata, ids: dict[str, int], model: str) -> list[tuple[str, str]]:
    key = f"{_PREFIX}merges"
    if not keys.has(key) and model == SENTENCEPIECE:
        return []
    return list(_checked_pairs(keys, keys.strings(key), ids))


def _checked_pairs(keys: Metadata, merges: list[str], ids: dict[str, int]) -> Iterator[tuple[str, str]]:
    for merge in merges:
        # llama.cpp too looks for the separator only after the first character.
        left, _, right = merge[1:].partition(" ")
        left = merge[:1] + left
        if left not in ids or right not in ids or left + right not in ids:
            raise ModelLoadError(
                f"{keys.path}: the tokenizer's merges do not hold: {merge[:40]!r} does not make a token of two tokens"
            )
        yield left, right
