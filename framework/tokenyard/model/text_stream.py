"""Token ids -> text, one id at a time, so that no delta ever shows half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_MAX_WITHHELD = 3  # an incomplete UTF-8 character shows as at most three replacement characters
_CONTEXT_IDS = 6  # of the prompt, for decoders that treat the start of a text specially
_MAX_WINDOW = 32
_KEPT_WINDOW = 8  # enough bytes for any character that is still incomplete


class TextStream:
    """Decodes a window of recent ids again at each step and hands out what is new and can no longer change.

    The deltas and the final `flush` together are the full decode. At most three characters are withheld at a time,
    those that the next ids may still complete; the window is bounded, so no step costs more as the text grows.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        *,
        skipped_ids: frozenset[int],
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._skipped_ids = skipped_ids
        self._window = [index for index in prompt_ids if index not in skipped_ids][-_CONTEXT_IDS:]
        self._fresh = len(self._window)  # where the ids after the last clean cut begin in the window
        self._emitted = len(decode(self._window).rstrip(_REPLACEMENT)) if self._window else 0

    def step(self, token_id: int) -> str | None:
        """The text that this id settles, or None."""
        if token_id in self._skipped_ids:
            return None
        self._window.append(token_id)
        text = self._decode(self._window)
        delta = self._take(self._settled(text))
        if delta and not text.endswith(_REPLACEMENT):
            self._cut_clean()
        elif len(self._window) > _MAX_WINDOW:
            self._cut_dirty(len(text) - self._emitted)
        return delta or None

    def flush(self) -> str:
        """The end: whatever is still withheld, incomplete characters as U+FFFD. The stream is used up."""
        return self._take(self._decode(self._window)) if self._window else ""

    def _settled(self, text: str) -> str:
        """`text` without the end that later ids may still change.

        A decoder that falls back to bytes shows a whole run of them as replacement characters until the run is valid,
        so nothing of the run counts before more ids came than one character has bytes.
        """
        stripped = text.rstrip(_REPLACEMENT)
        if len(self._window) - self._fresh <= _MAX_WITHHELD:
            return stripped
        return text[: max(len(stripped), len(text) - _MAX_WITHHELD)]

    def _take(self, text: str) -> str:
        delta = text[self._emitted :]
        self._emitted += len(delta)
        return delta

    def _cut_clean(self) -> None:
        """Everything is handed out: keep only the last ids that made text, as context."""
        self._window = self._window[self._fresh :]
        self._fresh = len(self._window)
        self._emitted = len(self._decode(self._window))

    def _cut_dirty(self, withheld: int) -> None:
        """A long run without a clean cut: keep its end, with as many characters withheld as before."""
        self._window = self._window[-_KEPT_WINDOW:]
        self._fresh = 0
        self._emitted = max(0, len(self._decode(self._window)) - withheld)
