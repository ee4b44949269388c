"""StopStrings: finds the first of several strings in a text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class StopMatch(NamedTuple):
    """Where a stop string was found, relative to the piece in which it ends."""

    string: str
    end: int  # characters of the piece up to and with its last one
    start: int  # of its first character; negative where that came with earlier pieces


class StopStrings:
    """Knuth, Morris and Pratt for each string: a character costs the same however long the text and the strings are."""

    def __init__(self, strings: Sequence[str]) -> None:
        self._searches = [_Search(string) for string in dict.fromkeys(strings)]

    @property
    def num_begun(self) -> int:
        """Length of the longest end of the text so far that is the beginning of a stop string."""
        return max(search.num_matched for search in self._searches)

    def find(self, piece: str) -> StopMatch | None:
        """Take in the next piece; of the matches that end in it, the one that ends first and of those the longest.

        That is what a reader of the stream meets first. After a match the search is used up.
        """
        matches = [match for search in self._searches if (match := search.find(piece)) is not None]
        return min(matches, key=lambda match: (match.end, match.start)) if matches else None

    def skip(self, piece: str) -> None:
        """Take in a piece in which no match counts; one that ends later may still have begun in it."""
        for search in self._searches:
            place: int | None = 0
            while place is not None:
                match = search.find(piece, place)
                place = None if match is None else match.end


class _Search:
    """One string; `num_matched` is how much of it the end of the text so far matches, less than all of it."""

    __slots__ = ("_borders", "_first", "_string", "num_matched")

    def __init__(self, string: str) -> None:
        self._string = string
        self._first = string[0]
        self._borders = _borders_of(string)
        self.num_matched = 0

    def find(self, piece: str, place: int = 0) -> StopMatch | None:
        """The first match that ends in piece[place:]."""
        string, borders, count = self._string, self._borders, self.num_matched
        if not count:  # most pieces have nothing of it, which one call finds out
            place = piece.find(self._first, place)
            if place < 0:
                return None
        for end in range(place + 1, len(piece) + 1):
            character = piece[end - 1]
            while count and string[count] != character:
                count = borders[count - 1]
            count += string[count] == character
            if count == len(string):
                self.num_matched = borders[count - 1]
                return StopMatch(string, end, end - count)
        self.num_matched = count
        return None


def _borders_of(string: str) -> list[int]:
    """For each beginning of the string: the longest shorter one that it also ends with."""
    borders, count = [0], 0
    for character in string[1:]:
        while count and string[count] != character:
            count = borders[count - 1]
        count += string[count] == character
        borders.append(count)
    return borders
