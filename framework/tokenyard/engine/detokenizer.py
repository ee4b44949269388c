"""Detokenizer: text of one request, token by token, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.model.tokenizer import Tokenizer


class Detokenizer:
    """`text` grows with `add`; it never shows half a character, nor a beginning that may become a stop string.

    No stop string is complete within the first `min_tokens` tokens: their text is as if it matched none.
    """

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], stop: Sequence[str], min_tokens: int = 0
    ) -> None:
        self._stream = tokenizer.new_stream(prompt_ids=prompt_token_ids)
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._longest_stop = max((len(string) for string in self._stop), default=0)
        self._decoded = ""
        self._num_searched = 0  # characters that no stop string can begin in any more
        self._num_kept = 0  # characters that no stop string may end in: those of the first min_tokens tokens
        self._shown = 0
        self.token_ids: list[int] = []
        self.stop_string: str | None = None

    @property
    def text(self) -> str:
        """What may be shown."""
        return self._decoded[: self._shown]

    def add(self, token_ids: Sequence[int]) -> str | None:
        """Take in tokens; returns the stop string that the text has reached, if any. Later tokens are dropped then."""
        for token_id in token_ids:
            if self.stop_string is not None:
                return self.stop_string
            self.token_ids.append(token_id)
            piece = self._stream.step(token_id)
            if piece:
                self._decoded += piece
                self._search()
        return self.stop_string

    def add_hidden(self, token_id: int) -> None:
        """Take in the token that ended the request, which has no text; dropped after a stop string."""
        if self.stop_string is None:
            self.token_ids.append(token_id)

    def finish(self) -> None:
        """No more tokens: show what was held back, incomplete characters included."""
        if self.stop_string is not None:
            return
        self._decoded += self._stream.flush()
        self._search()
        if self.stop_string is None:
            self._shown = len(self._decoded)

    def _search(self) -> None:
        if len(self.token_ids) <= self._min_tokens:
            self._num_kept = len(self._decoded)
        found = [(at, string) for string in self._stop if (at := self._find(string)) >= 0]
        if found:
            # The match that ends first is the one that a reader of the stream meets first.
            at, self.stop_string = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            self._decoded = self._decoded[:at]
            self._shown = at
            return
        self._num_searched = max(self._num_searched, len(self._decoded) - self._longest_stop + 1)
        self._shown = len(self._decoded) - self._held_back()

    def _find(self, string: str) -> int:
        """Where the first match begins that ends in text where it may, or -1."""
        return self._decoded.find(string, max(self._num_searched, self._num_kept + 1 - len(string)))

    def _held_back(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        for length in range(min(self._longest_stop - 1, len(self._decoded)), 0, -1):
            end = self._decoded[-length:]
            if any(string.startswith(end) for string in self._stop):
                return length
        return 0
