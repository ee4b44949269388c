"""BadWords: words that an output must not contain, as the token sequences that would write them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.model.tokenizer import Tokenizer

_ANCHOR = "("  # what a word may follow without a blank; some tokenizers spell it differently there
_MAX_KEPT = 4096  # words

TokenIds = tuple[int, ...]


class BadWords:
    """Of one tokenizer. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._spellings_of = lru_cache(maxsize=_MAX_KEPT)(self._spellings)

    def token_ids(self, words: Sequence[str]) -> tuple[TokenIds, ...]:
        """Every spelling of each word, each once."""
        return tuple(dict.fromkeys(spelling for word in words for spelling in self._spellings_of(word)))

    def _spellings(self, word: str) -> tuple[TokenIds, ...]:
        """A word at the start of a text, inside of it, and right after other characters; blanks before it are left out.

        What has ids that the model has no row for is never sampled, so it needs no ban.
        """
        bare = word.lstrip(" ") or word
        found = (ids for ids in self._encodings(bare) if ids and max(ids) < self._vocab_size)
        return tuple(dict.fromkeys(found))

    def _encodings(self, bare: str) -> Iterator[TokenIds]:
        yield self._encode(bare)
        yield self._encode(f" {bare}")
        anchor, anchored = self._encode(_ANCHOR), self._encode(_ANCHOR + bare)
        if anchored[: len(anchor)] == anchor:
            yield anchored[len(anchor) :]

    def _encode(self, text: str) -> TokenIds:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False))
