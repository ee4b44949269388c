"""Detokenizer: text of one completion, token by token, with stop strings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenyard.engine.stop_strings import StopStrings

if TYPE_CHECKING:
    from tokenyard.model.tokenizer import Tokenizer


class Detokenizer:
    """The text grows with `add`; it never shows half a character, nor a beginning that may become a stop string.

    No stop string is complete within the first `min_tokens` tokens: their text is as if it matched none. With
    `includes_stop` the text goes up to the end of what stopped it, so that nothing need be held back. With
    `detokenizes=False` there are tokens and no text. A token costs the same however long the text is.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        prompt_token_ids: Sequence[int],
        stop: Sequence[str] = (),
        min_tokens: int = 0,
        *,
        includes_stop: bool = False,
        skip_special_tokens: bool = True,
        detokenizes: bool = True,
    ) -> None:
        self._stream = tokenizer.new_stream(skip_special_tokens, prompt_token_ids) if detokenizes else None
        self._stops = StopStrings(stop) if stop else None
        self._min_tokens = min_tokens
        self._includes_stop = includes_stop
        self._held = ""  # settled text that may be the beginning of a stop string
        self._pieces: list[str] = []
        self.token_ids: list[int] = []
        self.stop_string: str | None = None

    @property
    def text(self) -> str:
        """What may be shown."""
        return "".join(self._pieces)

    @property
    def num_pieces(self) -> int:
        """A mark for `text_since`."""
        return len(self._pieces)

    def text_since(self, mark: int) -> str:
        """What has come to the text since `num_pieces` was `mark`."""
        return "".join(self._pieces[mark:])

    def add(self, token_ids: Sequence[int]) -> str | None:
        """Take in tokens; returns the stop string that the text has reached, if any. Later tokens are dropped then."""
        stream = self._stream
        if stream is None:
            self.token_ids += token_ids
            return None
        for token_id in token_ids:
            if self.stop_string is not None:
                break
            self.token_ids.append(token_id)
            piece = stream.step(token_id)
            if piece:
                if self._stops is None:
                    self._pieces.append(piece)
                else:
                    self._search(piece, self._stops)
        return self.stop_string

    def add_stop_token(self, token_id: int) -> None:
        """Take in the token that ended the request, whose text counts only with `includes_stop`.

        It is dropped after a stop string, and completes none.
        """
        if self.stop_string is not None:
            return
        self.token_ids.append(token_id)
        if self._includes_stop and self._stream is not None:
            self._stops = None
            self._show(self._stream.step(token_id))

    def finish(self) -> None:
        """No more tokens: show what was held back, incomplete characters included."""
        if self.stop_string is not None or self._stream is None:
            return
        piece = self._stream.flush()
        if piece and self._stops is not None:
            self._search(piece, self._stops)
        elif piece:
            self._pieces.append(piece)
        if self.stop_string is None:
            self._show(self._held)

    def _search(self, piece: str, stops: StopStrings) -> None:
        if len(self.token_ids) <= self._min_tokens:
            stops.skip(piece)
        elif (match := stops.find(piece)) is not None:
            self.stop_string = match.string
            end = match.end if self._includes_stop else match.start
            self._show((self._held + piece)[: len(self._held) + end])
            return
        text = self._held + piece
        num_held = 0 if self._includes_stop else stops.num_begun
        self._held = text[len(text) - num_held :]
        self._show(text[: len(text) - num_held])

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)
