"""How much text a number of tokens can stand for: what is longer is refused before it costs the time to encode it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from tokenizers import models

from tokenyard.model.token_bytes import byte_of_character

if TYPE_CHECKING:
    import tokenizers
    from tokenizers.normalizers import Normalizer
    from tokenizers.pre_tokenizers import PreTokenizer

MAX_TOKEN_BYTES = 256
"""Bytes of text that are taken for each token where a token may stand for any number: far more than language has."""
_BYTE_TOKENS = {f"<0x{value:02X}>": value for value in range(256)}
_KEEPING_SPLITS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts"})
_SHRINKING = {"NFC": 4, "NFD": 4, "NFKC": 4, "NFKD": 4, "Prepend": 1}  # at most so many bytes become one


class TextBound(NamedTuple):
    """What a tokenizer makes of text at most."""

    bytes_per_token: int  # of UTF-8, that one token stands for
    without_token: bytes = b""  # bytes that the vocabulary does not have; any number of them is dropped

    def size(self, text: str) -> int:
        """Bytes of the text that have to be in some token. UnicodeEncodeError for what is no text."""
        return len(text.encode().translate(None, self.without_token))


def text_bound(backend: tokenizers.Tokenizer) -> TextBound:
    """Takes a tenth of a second. Where the tokenizer itself sets no bound there is MAX_TOKEN_BYTES."""
    splits = _steps(backend.pre_tokenizer, "pretokenizers")
    normalizers = _steps(backend.normalizer, "normalizers")
    added = backend.get_added_tokens_decoder().values()
    is_byte_level = any(split.get("type") == "ByteLevel" for split in splits)
    shrinking, without_token = _shrinking(normalizers), _without_token(backend, is_byte_level)
    is_known = shrinking is not None and without_token is not None and not (without_token and normalizers)
    if not is_known or not all(map(_keeps_text, splits)) or any(token.lstrip or token.rstrip for token in added):
        return TextBound(MAX_TOKEN_BYTES)
    # A character of a byte-level token is one byte of text.
    sizes = [len(token) if is_byte_level else len(token.encode()) for token in backend.get_vocab()]
    longest = max(*sizes, *(len(token.content.encode()) for token in added), 1)
    return TextBound(longest * (shrinking or 1), without_token or b"")


def _without_token(backend: tokenizers.Tokenizer, is_byte_level: bool) -> bytes | None:
    """The bytes that no token spells; None where whole characters may have none."""
    model = backend.model
    if not isinstance(model, models.BPE) or not (is_byte_level or model.byte_fallback):
        return None
    spelled = byte_of_character() if is_byte_level else _BYTE_TOKENS
    missing = bytes(value for token, value in spelled.items() if backend.token_to_id(token) is None)
    return missing if is_byte_level or not missing else None


def _keeps_text(split: Mapping[str, object]) -> bool:
    kind = split.get("type")
    return kind in _KEEPING_SPLITS or (kind == "Split" and split.get("behavior") != "Removed")


def _shrinking(normalizers: list[Mapping[str, object]]) -> int | None:
    """At most so many bytes become one; None when there is no such bound."""
    product = 1
    for step in normalizers:
        if step.get("type") == "Replace":
            pattern, content = step.get("pattern"), step.get("content")
            text = pattern.get("String") if isinstance(pattern, dict) else None
            factor = 1 if isinstance(text, str) and isinstance(content, str) and _grows(text, content) else None
        else:
            factor = _SHRINKING.get(str(step.get("type")))
        if factor is None:
            return None
        product *= factor
    return product


def _grows(text: str, content: str) -> bool:
    return len(content.encode()) >= len(text.encode())


def _steps(part: Normalizer | PreTokenizer | None, key: str) -> list[Mapping[str, object]]:
    """A part of tokenizer.json, as the list of its steps; a sequence within a sequence is left as it is."""
    if part is None:
        return []
    state = json.loads(part.__getstate__())
    steps: list[Mapping[str, object]] = state[key] if state["type"] == "Sequence" else [state]
    return steps
