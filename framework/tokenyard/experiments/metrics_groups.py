"""The same figures for parts of the requests: by client, by priority, by length of prompt and of output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from tokenyard.experiments.metrics_latency import is_finished
from tokenyard.experiments.metrics_service import clients_of
from tokenyard.experiments.metrics_statistics import pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from tokenyard.experiments.metrics_statistics import Flags
    from tokenyard.experiments.records import RequestTable

ScalarT = TypeVar("ScalarT", bound=np.generic)

MOST_GROUPS = 64  # of one kind: those with most requests
BAND_STARTS = (0, 16, 64, 256, 1024, 4096, 16384, 65536)  # tokens; each four times the one before


@dataclass(frozen=True, slots=True, kw_only=True)
class Grouping:
    """G groups of requests."""

    key: str  # in the metrics
    names: tuple[str, ...]
    numbers: NDArray[np.uint8]  # [N] index into `names`; another number = in none of them

    def split(self, column: NDArray[ScalarT]) -> Iterator[tuple[str, NDArray[ScalarT]]]:
        """The values of each group, copied."""
        for number, name in enumerate(self.names):
            yield name, column[self.numbers == number]


def groupings(requests: RequestTable) -> Iterator[Grouping]:
    """All of them. By output are the finished ones alone: how long the others would have been nobody knows."""
    yield _bands("by_prompt_length", requests.prompt, None)
    yield _bands("by_output_length", requests.output, is_finished(requests))
    if requests.clients:
        numbers, names = clients_of(requests)
        yield _grouping("by_client", names, len(requests), lambda piece: numbers[piece])
    priorities = np.unique(requests.priority)
    if len(priorities) > 1:
        names = tuple(map(str, priorities.tolist()))
        yield _grouping(
            "by_priority", names, len(requests), lambda piece: np.searchsorted(priorities, requests.priority[piece])
        )


def band_names() -> tuple[str, ...]:
    """ "0-15", "16-63", ..., "65536-" """
    ends = [str(start - 1) for start in BAND_STARTS[1:]]
    return tuple(f"{start}-{end}" for start, end in zip(BAND_STARTS, [*ends, ""], strict=True))


def _bands(key: str, lengths: NDArray[np.int32], chosen: Flags | None) -> Grouping:
    def numbers(piece: slice) -> NDArray[np.integer]:
        bands = np.searchsorted(BAND_STARTS, lengths[piece], side="right") - 1
        return bands if chosen is None else np.where(chosen[piece], bands, len(BAND_STARTS))

    return _grouping(key, band_names(), len(lengths), numbers)


def _grouping(
    key: str, names: tuple[str, ...], length: int, numbers: Callable[[slice], NDArray[np.integer]]
) -> Grouping:
    """The largest groups by number, those without requests left out; a number without a name is in none."""
    counts = np.zeros(len(names) + 1, dtype=np.int64)
    for piece in pieces(length):
        counts += np.bincount(numbers(piece), minlength=len(counts))
    counts = counts[:-1]
    largest = np.argsort(-counts, kind="stable")[:MOST_GROUPS]
    chosen = np.sort(largest[counts[largest] > 0])
    places = np.full(len(names) + 1, MOST_GROUPS, dtype=np.uint8)
    places[chosen] = np.arange(len(chosen))
    found = np.empty(length, dtype=np.uint8)
    for piece in pieces(length):
        found[piece] = places[numbers(piece)]
    return Grouping(key=key, names=tuple(names[index] for index in chosen), numbers=found)
