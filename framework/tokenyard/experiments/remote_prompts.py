"""RemotePrompts: a workload's prompts for a server, as token ids or as text, and its answers in later turns."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.experiments.content import ContentTokens
from tokenyard.interfaces.workload import OUTPUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import IntArray
    from tokenyard.experiments.arrivals import Arrived
    from tokenyard.interfaces.workload import Segment

_FIRST_ID, _LAST_ID = 300, 8192  # below are control tokens and single bytes in many vocabularies, and few end earlier
# One token each with a space before it, in vocabularies that were made of English text.
_WORDS = [
    *("the", "of", "and", "to", "in", "a", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not"),
    *("he", "this", "are", "or", "his", "from", "at", "which", "but", "have", "an", "had", "they", "you", "were"),
    *("their", "one", "all", "we", "can", "her", "has", "there", "been", "if", "more", "when", "will", "would", "who"),
]


class RemotePrompts:
    """A server's vocabulary is unknown: ids are of a range that nearly all have, and a word is about a token."""

    def __init__(self, seed: int, *, sends_ids: bool, has_content: bool) -> None:
        self._sends_ids = sends_ids
        self._has_content = has_content
        first, last = (_FIRST_ID, _LAST_ID) if sends_ids else (0, len(_WORDS))
        self._tokens = ContentTokens(np.arange(first, last, dtype=np.int32), seed)
        self._ids: dict[str, list[IntArray]] = {}  # answers by session
        self._texts: dict[str, list[str]] = {}

    def keeps(self, arrived: Arrived) -> bool:
        """Whether its answer may be part of a later prompt."""
        return self._has_content and arrived.request.session is not None

    def answered(self, arrived: Arrived, ids: Sequence[int], text: str) -> None:
        """Of one whose answer is kept. Without ids that it was told, the tokens of an answer are drawn."""
        session = arrived.request.session or ""
        self._ids.setdefault(session, []).append(np.array(ids, dtype=np.int32))
        self._texts.setdefault(session, []).append(text)

    def of(self, arrived: Arrived) -> list[int] | str:
        request = arrived.request
        session = request.session or ""
        if request.content is None or not self._has_content:
            return self._shown(self._tokens.unknown(arrived.number, request.num_prompt_tokens))
        if self._sends_ids:
            return self._shown(self._tokens.of(request.content, self._ids.get(session, ())))
        return self._text(request.content, self._texts.get(session, ()))

    def _text(self, content: Sequence[Segment], answers: Sequence[str]) -> str:
        """The last OUTPUT segment is the last answer, and so on backwards."""
        left = list(answers)
        pieces = []
        for segment in reversed(content):
            is_answer = segment.content == OUTPUT and left
            pieces.append(left.pop() if is_answer else _words(self._tokens.of([segment])))
        return "".join(reversed(pieces))

    def _shown(self, tokens: IntArray) -> list[int] | str:
        ids: list[int] = tokens.tolist()
        return ids if self._sends_ids else _words(tokens)


def _words(tokens: IntArray) -> str:
    return "".join(f" {_WORDS[token]}" for token in tokens.tolist())
