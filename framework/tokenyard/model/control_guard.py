"""Keeping control tokens out of given text: what a user writes is encoded as text, whatever it spells.

Two tricks. In what a template is given, each control token's name is replaced by a mark before rendering, so that
afterwards every name in the rendered text is the template's own. And a copy of the tokenizer knows the control tokens
by secret aliases only: with the template's names replaced by aliases, and the marks by the names they stand for,
one call encodes the whole prompt as the tokenizer would, with the user's names as plain text.
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

ValueT = TypeVar("ValueT")


class ControlGuard:
    """Made when first needed: the copy costs as much time and memory as the tokenizer itself."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        specials = {index: token for index, token in backend.get_added_tokens_decoder().items() if token.special}
        # Matched after normalising: text that spells no name may become one, so the copy is used for every chat.
        self.always_needed = backend.normalizer is not None and any(t.normalized for t in specials.values())
        self._special_ids = {token.content: index for index, token in specials.items()}
        secret = secrets.token_hex(8)  # not to be guessed, so no text can hold a mark or an alias
        self._marks = {name: f"\ue000{secret}m{index}\ue001" for name, index in self._special_ids.items()}
        self._aliases = {name: f"\ue000{secret}a{index}\ue001" for name, index in self._special_ids.items()}
        self._names = _one_of(self._special_ids)
        self._mark_pattern = _one_of(self._marks.values())
        self._name_of_mark = {mark: name for name, mark in self._marks.items()}
        self._backend = backend
        self._copy: _AliasedCopy | None = None

    def mark(self, value: ValueT) -> ValueT:
        """`value` with each control token's name replaced by its mark, at every depth."""
        return cast(ValueT, self._mark(cast(PlainValue, value)))

    def encode_marked(self, rendered: str) -> list[int]:
        """Ids of a text rendered from marked values."""
        aliased = self._names.sub(lambda match: self._aliases[match[0]], rendered)
        restored = self._mark_pattern.sub(lambda match: self._name_of_mark[match[0]], aliased)
        return self._aliased_copy().encode(restored, add_special_tokens=False)

    def encode_as_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of a text in which nothing is a control token."""
        return self._aliased_copy().encode(text, add_special_tokens=add_special_tokens)

    def _mark(self, value: PlainValue) -> PlainValue:
        if isinstance(value, str):
            return self._names.sub(lambda match: self._marks[match[0]], value)
        if isinstance(value, list):
            return [self._mark(item) for item in value]
        if isinstance(value, dict):
            return {str(self._mark(key)): self._mark(item) for key, item in value.items()}
        return value

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
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
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
