"""The load that calibrates: first the edges of what may come, then closed loops of all sizes.

The edges are there so that a fit says little of loads beyond what it has seen; the loops are drawn so that small and
large ones are as frequent.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np

    from tokenyard.request import EngineCoreRequest

_LEAST_OUTPUT, _MOST_OUTPUT = 4, 24  # tokens
_ROUNDS = 2  # requests that take each place, so that prefills meet decodes
_TIMES = 2  # that each edge is run
_FEW = 8  # tokens of a prompt that hardly counts
_MOST_DECODES = 128  # at once, of an edge


class Lengths(NamedTuple):
    """Tokens of a request."""

    prompt: int
    output: int


class Phase(NamedTuple):
    """A closed loop."""

    at_once: int
    requests: Sequence[Lengths]


class Limits(NamedTuple):
    """What an engine takes."""

    max_num_seqs: int
    max_num_batched_tokens: int
    capacity: int  # tokens of a request
    kv_tokens: int  # of all that run


def edges(limits: Limits, most_tokens: int) -> Iterator[Phase]:
    """Prompts of all lengths alone, batches of decodes of all sizes, and decodes far behind in long contexts.

    No phase has more than about `most_tokens`, but for prompts that fill a step.
    """
    longest = min(limits.max_num_batched_tokens, limits.capacity - 2, limits.kv_tokens - 2)
    for prompt in _doubling(longest):
        yield Phase(1, [Lengths(prompt, 2)] * _TIMES)
    output = min(_FEW, limits.capacity // 2)
    prompt = min(_FEW, limits.capacity - output)
    each = prompt + output
    for count in _doubling(min(limits.max_num_seqs, _MOST_DECODES, limits.kv_tokens // each, most_tokens // each)):
        yield Phase(count, [Lengths(prompt, output)] * count)
    for count in _doubling(min(limits.max_num_seqs, 4)):
        room = min(limits.capacity, limits.kv_tokens // count, most_tokens // count) - output
        if room > longest:
            yield Phase(count, [Lengths(room, output)] * count)


def _doubling(most: int) -> Iterator[int]:
    """1, 2, 4, ... and the most itself; nothing where that is below 1."""
    number = 1
    while number < most:
        yield number
        number *= 2
    if most >= 1:
        yield most


def mixed_phase(limits: Limits, most_tokens: int, rng: np.random.Generator) -> Phase:
    """Of at most about `most_tokens`, prompts and outputs together: so much fits into the time."""
    output = min(_MOST_OUTPUT, max(1, limits.capacity // 2))
    most_at_once = max(1, min(limits.max_num_seqs, most_tokens // (_ROUNDS * (output + 1))))
    at_once = _log_uniform(1, most_at_once, rng)
    room = min(
        limits.capacity - output, limits.kv_tokens // at_once - output, most_tokens // (_ROUNDS * at_once) - output
    )
    longest = _log_uniform(1, max(1, room), rng)
    count = _ROUNDS * at_once
    prompts = rng.integers(max(1, longest // 2), longest, count, endpoint=True).tolist()
    outputs = rng.integers(min(_LEAST_OUTPUT, output), output, count, endpoint=True).tolist()
    return Phase(at_once, [Lengths(*pair) for pair in zip(prompts, outputs, strict=True)])


def _log_uniform(least: int, most: int, rng: np.random.Generator) -> int:
    return min(most, int(math.exp(rng.uniform(math.log(least), math.log(most + 1)))))


class ClosedLoop:
    """A phase as a driver takes it."""

    event = None

    def __init__(self, phase: Phase, make: Callable[[Lengths], EngineCoreRequest]) -> None:
        self._left = list(reversed(phase.requests))
        self._make = make
        self._num_free = phase.at_once

    def due(self, now: float) -> Sequence[EngineCoreRequest]:
        found = [self._make(self._left.pop()) for _ in range(min(self._num_free, len(self._left)))]
        self._num_free -= len(found)
        return found

    def next_time(self) -> float | None:
        return None

    def is_exhausted(self) -> bool:
        return not self._left

    def ended(self, count: int) -> None:
        """So many have ended."""
        self._num_free += count
