"""TextStream: token ids -> text, one id at a time, for any decoder; no delta ever shows half a character."""

from __future__ import annotations

from collections.abc import Callable, Sequence

_REPLACEMENT = "\ufffd"
_MAX_WITHHELD = 3  # an incomplete UTF-8 character shows as at most three replacement characters
_CONTEXT_IDS = 6  # of the prompt, for decoders that treat the start of a text specially
_MAX_WINDOW = 32
_KEPT_WINDOW = 8  # enough bytes for any character that is still incomplete


class TextStream:
    """Decodes a window of recent ids again at each step and hands out what is new and can no longer change.

    What is handed out and the final `flush` together are the full decode. At most three characters are withheld at a
    time, those that the next ids may still complete; the window is bounded, so no step costs more as the text grows.
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
        self._window = [index for index in prompt_ids[-_MAX_WINDOW:] if index not in skipped_ids][-_CONTEXT_IDS:]
        self._fresh = len(self._window)  # where the ids after the last clean cut begin in the window
        before = decode(self._window) if self._window else ""
        self._emitted = len(before.rstrip(_REPLACEMENT))
        # An incomplete character at the prompt's end: of the output once that completes it, else nobody's.
        self._foreign = before if len(before) > self._emitted else None

    def step(self, token_id: int) -> str:
        """The text that this id settles."""
        if token_id in self._skipped_ids:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        self._pass_over_foreign(text)
        delta = self._take(self._settled(text))
        if delta and not text.endswith(_REPLACEMENT):
            self._cut_clean()
        elif len(self._window) > _MAX_WINDOW:
            self._cut_dirty(len(text) - self._emitted)
        return delta

    def flush(self) -> str:
        """The end: whatever is still withheld, incomplete characters as U+FFFD. The stream is used up."""
        if not self._window or self._foreign is not None:
            return ""
        return self._take(self._decode(self._window))

    def _pass_over_foreign(self, text: str) -> None:
        if self._foreign is None or text == self._foreign:
            return
        if text.startswith(self._foreign):
            self._emitted = len(self._foreign)
        self._foreign = None

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
