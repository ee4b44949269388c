"""StopStrings: the first match in a text that comes in pieces, at a cost that depends on the piece alone."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_level
from tokenyard.engine.detokenizer import Detokenizer
from tokenyard.engine.stop_strings import StopStrings

if TYPE_CHECKING:
    from _typeshed import TraceFunction

TOKENIZER = byte_level()


@settings(deadline=None, max_examples=300)
@example(pieces=["aa", "ab"], stop=["aab"], num_skipped=0)
@example(pieces=["aba", "babb"], stop=["ababb"], num_skipped=1)
@given(
    pieces=st.lists(st.text(alphabet="ab", max_size=5), max_size=12),
    stop=st.lists(st.text(alphabet="ab", min_size=1, max_size=6), min_size=1, max_size=3),
    num_skipped=st.integers(0, 4),
)
def test_the_first_match_in_a_text_that_comes_in_pieces_is_found(
    pieces: list[str], stop: list[str], num_skipped: int
) -> None:
    stops, text = StopStrings(stop), ""
    for place, piece in enumerate(pieces):
        before, text = text, text + piece
        if place < num_skipped:
            stops.skip(piece)
            match = None
        else:
            match = stops.find(piece)
            ends = [
                (end - len(before), end - len(string) - len(before))
                for end in range(len(before) + 1, len(text) + 1)
                for string in stop
                if text[:end].endswith(string)
            ]
            assert (match is None) == (not ends)
        if match is not None:
            assert (match.end, match.start) == min(ends)
            assert text[len(before) + match.start : len(before) + match.end] == match.string
            return
        begun = [n for string in stop for n in range(1, len(string)) if text.endswith(string[:n])]
        assert stops.num_begun == max(begun, default=0)


def lines_run(call: Callable[[], object]) -> int:
    """How many lines of Python a call runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> TraceFunction:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize("text", ["plain text, no end. ", "a", "ab", "aaaaaaaaab", "你😀"])
def test_a_token_costs_the_same_however_long_text_and_stop_strings_are(text: str) -> None:
    ids = TOKENIZER.encode(text * 400)[:400]
    costs = {}
    for length in (500, 4000):
        stop = ["a" * length, "ab" * length + "c", "a" * 9 + "b" + "z" * length, "z" * length]
        detokenizer = Detokenizer(TOKENIZER, [], stop)
        costs[length] = [lines_run(lambda: detokenizer.add([token_id])) for token_id in ids]  # noqa: B023
        assert sum(costs[length][-100:]) <= 2 * sum(costs[length][100:200]) + 100
    assert sum(costs[4000]) <= 2 * sum(costs[500]) + 400
