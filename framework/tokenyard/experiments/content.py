"""ContentTokens: what stands in the prompts of a workload, as token ids of a real vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.interfaces.workload import OUTPUT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from tokenyard.arrays import IntArray
    from tokenyard.interfaces.workload import Segment

_WORD = 2**64
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class ContentTokens:
    """Token i of content c is drawn from `vocabulary` by seed, c and i alone: equal segments begin with equal tokens.

    Nothing is remembered, however much content there is.
    """

    def __init__(self, vocabulary: IntArray, seed: int) -> None:
        """`vocabulary`: [V] the token ids that may come."""
        self._vocabulary = vocabulary
        self._known = _mixed_number(seed)
        self._unknown = _mixed_number(self._known + 1)  # a stream apart: no content that is told equals one that is not

    def unknown(self, number: int, num_tokens: int) -> IntArray:
        """[num_tokens] of a prompt that is not told: of each request, by its number, another one."""
        return self._draw(self._unknown, [number], [num_tokens])

    def of(self, content: Sequence[Segment], answers: Sequence[IntArray] = ()) -> IntArray:
        """[sum of num_tokens]. `answers`: what the session was answered, the last one last.

        The last OUTPUT segment is the last answer, and so on backwards. An answer that is shorter than its segment, or
        not there, is drawn.
        """
        lengths = [segment.num_tokens for segment in content]
        # OUTPUT is no content of its own; what is drawn for it is overwritten as far as the answer goes.
        names = [_WORD - 1 - at if one.content == OUTPUT else one.content for at, one in enumerate(content)]
        tokens = self._draw(self._known, names, lengths)
        ends = np.cumsum(lengths)
        outputs = [at for at, segment in enumerate(content) if segment.content == OUTPUT]
        for at, answer in zip(reversed(outputs), reversed(answers), strict=False):
            begin, length = int(ends[at]) - lengths[at], min(lengths[at], len(answer))
            tokens[begin : begin + length] = answer[:length]
        return tokens

    def _draw(self, key: int, names: Sequence[int], lengths: Sequence[int]) -> IntArray:
        seeds = _mixed(np.array([(name + key) % _WORD for name in names], dtype=np.uint64))
        counts = np.array(lengths, dtype=np.int64)
        positions = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
        drawn = _mixed(np.repeat(seeds, counts) + positions.astype(np.uint64) * _GOLDEN)
        found: IntArray = self._vocabulary[(drawn % np.uint64(len(self._vocabulary))).astype(np.int64)]
        return found


def _mixed_number(value: int) -> int:
    return int(_mixed(np.array([value % _WORD], dtype=np.uint64))[0])


def _mixed(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number Generators, 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
