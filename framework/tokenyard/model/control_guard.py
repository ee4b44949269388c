"""Keeping control tokens out of given text: what a user writes is encoded as text, whatever it spells.

Two tricks. In what a template is given, each control token's name is replaced by a mark before rendering, so that
afterwards every name in the rendered text is the template's own; so is the beginning of a name at the end of a text,
and the end of one at its start, since the template may put another given text beside it. And a copy of the tokenizer
knows the control tokens by secret aliases only: with the template's names replaced by aliases, and the marks by what
they stand for, one call encodes the whole prompt as the tokenizer would, with the user's names as plain text.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterable
from typing import TypeVar, cast

import tokenizers

from tokenyard.errors import ValidationError
from tokenyard.model.chat_messages import PlainValue
from tokenyard.model.encoding import encode

ValueT = TypeVar("ValueT")


class ControlGuard:
    """Made when first needed: the copy costs as much time and memory as the tokenizer itself."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        specials = {index: token for index, token in backend.get_added_tokens_decoder().items() if token.special}
        # Matched after normalising: text that spells no name may become one, so the copy is used for every chat.
        self.always_needed = backend.normalizer is not None and any(t.normalized for t in specials.values())
        self._special_ids = {token.content: index for index, token in specials.items()}
        self._secret = f"{secrets.randbelow(10**20):020d}"  # not to be guessed, so no text can hold a mark or an alias
        self._aliases = {name: f"\ue002{self._secret}{index}\ue001" for name, index in self._special_ids.items()}
        self._names = _one_of(self._special_ids)
        self._mark_pattern = re.compile(f"\ue000{self._secret}([0-9a-fA-F]+)\ue001")
        self._heads = _cuttings(name[:size] for name in self._special_ids for size in range(1, len(name)))
        self._tails = _cuttings(name[-size:] for name in self._special_ids for size in range(1, len(name)))
        self._longest = max(map(len, self._heads | self._tails), default=0)
        self._backend = backend
        self._copy: _AliasedCopy | None = None

    def mark(self, value: ValueT) -> ValueT:
        """`value` with each control token's name replaced by its mark, at every depth."""
        return cast(ValueT, self._mark(cast(PlainValue, value)))

    def unmark(self, text: str) -> str:
        """`text` with each mark replaced by what it stands for."""
        return self._mark_pattern.sub(lambda match: bytes.fromhex(match[1]).decode(), text)

    def encode_marked(self, rendered: str) -> list[int]:
        """Ids of a text rendered from marked values."""
        aliased = self._names.sub(lambda match: self._aliases[match[0]], rendered)
        restored = self.unmark(aliased)
        return self._aliased_copy().encode(restored, add_special_tokens=False)

    def encode_as_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text in which nothing is a control token."""
        return self._aliased_copy().encode(text, add_special_tokens=add_special_tokens)

    def _mark(self, value: PlainValue) -> PlainValue:
        if isinstance(value, str):
            return self._names.sub(lambda match: self._mark_of(match[0]), self._mark_ends(value))
        if isinstance(value, list):
            return [self._mark(item) for item in value]
        if isinstance(value, dict):
            return {str(self._mark(key)): self._mark(item) for key, item in value.items()}
        return value

    def _mark_ends(self, text: str) -> str:
        """Templates trim, so white space does not count as the end of a text."""
        start, end = len(text) - len(text.lstrip()), len(text.rstrip())
        sizes = range(min(self._longest, end - start), 0, -1)
        head = next((size for size in sizes if text[end - size : end] in self._heads), 0)
        tail = next((size for size in sizes if text[start : start + size] in self._tails), 0)
        if head:
            text = text[: end - head] + self._mark_of(text[end - head : end]) + text[end:]
        if tail and start + tail <= end - head:
            text = text[:start] + self._mark_of(text[start : start + tail]) + text[start + tail :]
        return text

    def _mark_of(self, text: str) -> str:
        return f"\ue000{self._secret}{text.encode().hex()}\ue001"

    def _aliased_copy(self) -> _AliasedCopy:
        if self._copy is None:
            self._copy = _AliasedCopy(self._backend, self._aliases, self._special_ids)
        return self._copy


class _AliasedCopy:
    def __init__(self, backend: tokenizers.Tokenizer, aliases: dict[str, str], special_ids: dict[str, int]) -> None:
        description = json.loads(backend.to_str())
        for token in description["added_tokens"]:
            token["content"] = aliases.get(token["content"], token["content"])
        self._backend = tokenizers.Tokenizer.from_str(json.dumps(description))
        added = backend.get_added_tokens_decoder().values()
        spelled = {token.content: aliases.get(token.content, token.content) for token in added}
        # An alias is not in the vocabulary, so the copy numbers it anew.
        self._real_ids = {
            self._backend.token_to_id(alias): backend.token_to_id(name) for name, alias in spelled.items()
        }
        unknown = _unknown_id(backend, description["model"])
        self._forbidden = {index: name for name, index in special_ids.items() if index != unknown}

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        encoding = encode(self._backend, text, add_special_tokens=add_special_tokens)
        pairs = zip(encoding.ids, encoding.special_tokens_mask, strict=True)
        return [index if is_frame else self._real_id(index) for index, is_frame in pairs]

    def _real_id(self, index: int) -> int:
        real = self._real_ids.get(index)
        if real is not None:
            return real
        if index in self._forbidden:  # the vocabulary itself spells it: a few tokenizers do
            name = self._forbidden[index]
            raise ValidationError(
                f"the text contains {name!r}, which this model can only read as a control token; remove it",
                parameter="messages",
                value=name,
            )
        return index


def _cuttings(parts: Iterable[str]) -> frozenset[str]:
    """Parts of names, less those of letters and digits alone: they are in every text, and no name is all of those."""
    return frozenset(part for part in parts if not part.isalnum())


def _one_of(texts: Iterable[str]) -> re.Pattern[str]:
    longest_first = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _unknown_id(backend: tokenizers.Tokenizer, model: dict[str, object]) -> int | None:
    """The id for what the vocabulary cannot spell, which any text may give."""
    unknown = model.get("unk_token")
    if isinstance(unknown, str):
        return backend.token_to_id(unknown)
    index = model.get("unk_id")
    return index if isinstance(index, int) else None
