"""ByteStream: token ids -> text, one id at a time, for tokenizers whose tokens are bytes one after another."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.model.token_bytes import TokenBytes

_REPLACEMENT = "\ufffd"
_MOST_INCOMPLETE = 3  # bytes of a UTF-8 character that lacks one


class ByteStream:
    """Hands out characters once all their bytes are there; a step costs the same however long the text is.

    What is handed out and the final `flush` together are the full decode of the ids; bytes that are no UTF-8 become
    U+FFFD as they do there: one for each maximal part of a character, and with byte tokens (<0x0A>) one for each byte
    from the first wrong one to the end of the run. The full decode takes back characters before it in the run, which
    a stream has handed out already.

    `prompt_ids` are what stands before. An incomplete character at their end is completed by the first ids; when it is
    not, nothing of it shows, since it is not of this text.
    """

    def __init__(self, tokens: TokenBytes, *, skip_special_tokens: bool = True, prompt_ids: Sequence[int] = ()) -> None:
        self._tokens = tokens
        self._skips = skip_special_tokens
        self._whole = tokens.whole_texts(skip_special_tokens=skip_special_tokens)
        self._pending = b""  # of a character that lacks some bytes
        self._num_foreign = 0  # how many of them are the prompt's
        self._is_broken = False  # the run of byte tokens is no UTF-8
        self._is_first = True
        self._num_droppable = 0 if tokens.spelling is None else tokens.spelling.num_dropped_spaces
        self._take_in_prompt(prompt_ids)
        self._is_plain = self._find_plain()

    def step(self, token_id: int) -> str:
        """The text that this id settles."""
        if self._is_plain:
            text = self._whole.get(token_id)
            if text is not None:
                return text
        return self._step(token_id)

    def flush(self) -> str:
        """The end: an incomplete character as U+FFFD. The stream is used up."""
        return self._give_up()

    def _step(self, token_id: int) -> str:
        piece = self._tokens.piece(token_id, skip_special_tokens=self._skips)
        if piece is None:
            return ""
        data, self._is_first = piece.first if self._is_first else piece.data, False
        text = self._without_spaces(self._add_byte(data) if piece.is_byte else self._add(data))
        self._is_plain = self._find_plain()
        return text

    def _add(self, data: bytes) -> str:
        if self._has_byte_tokens:
            given_up, self._is_broken = self._give_up(), False
            return given_up + data.decode("utf-8", "replace")
        self._check_foreign(data[:1])
        data = self._pending + data
        text, used = codecs.utf_8_decode(data, "replace", False)
        self._keep(data[used:], is_continued=not used)
        return text

    def _add_byte(self, byte: bytes) -> str:
        if self._is_broken:
            return _REPLACEMENT
        self._check_foreign(byte)
        data = self._pending + byte
        try:
            text, used = codecs.utf_8_decode(data, "strict", False)
        except UnicodeDecodeError:
            self._pending, self._is_broken = data, True
            return self._give_up()
        self._keep(data[used:], is_continued=not used)
        return text

    def _keep(self, pending: bytes, *, is_continued: bool) -> None:
        self._pending = pending
        self._num_foreign = min(self._num_foreign, len(pending)) if is_continued else 0

    def _give_up(self) -> str:
        """No byte will complete what is pending."""
        pending, num_own = self._pending, len(self._pending) - self._num_foreign
        self._pending, self._num_foreign = b"", 0
        if self._has_byte_tokens:
            return _REPLACEMENT * num_own
        return pending.decode("utf-8", "replace") if num_own else ""

    def _without_spaces(self, text: str) -> str:
        if not self._num_droppable or not text:
            return text
        kept = text.lstrip(" ")
        num_dropped = min(len(text) - len(kept), self._num_droppable)
        self._num_droppable = 0 if kept else self._num_droppable - num_dropped
        return text[num_dropped:]

    def _take_in_prompt(self, prompt_ids: Sequence[int]) -> None:
        end = b""
        for token_id in reversed(prompt_ids):
            piece = self._tokens.piece(token_id, skip_special_tokens=self._skips)
            if piece is None:
                continue
            self._is_first, self._num_droppable = False, 0
            if self._has_byte_tokens and not piece.is_byte:
                break
            end = piece.data + end
            if len(end) >= _MOST_INCOMPLETE:
                break
        self._pending = end[codecs.utf_8_decode(end, "replace", False)[1] :]
        self._num_foreign = len(self._pending)

    def _check_foreign(self, next_byte: bytes) -> None:
        """Forget the prompt's incomplete character if this does not go on with it."""
        if 0 < self._num_foreign == len(self._pending) and not _is_begun(self._pending + next_byte):
            self._pending, self._num_foreign = b"", 0

    @property
    def _has_byte_tokens(self) -> bool:
        return self._tokens.spelling is not None and self._tokens.spelling.has_byte_tokens

    def _find_plain(self) -> bool:
        """Whether a whole character is handed out as it is."""
        return not (self._pending or self._is_broken or self._is_first or self._num_droppable)


def _is_begun(data: bytes) -> bool:
    """Whether the bytes are one character, or the beginning of one."""
    return len(data.decode("utf-8", "replace")) == 1
