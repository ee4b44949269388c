"""Format `servegen`: requests drawn from what ServeGen (arXiv 2505.09999) measured of each client."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.interfaces.workload import WorkloadRequest

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tokenyard.experiments.traces.reader import LeftOut
    from tokenyard.experiments.traces.servegen_files import LengthWindow, RateWindow, ServeGenClient

_CHUNK = 256  # draws at a time
_STREAM = 0x736572766567656E  # what sets these draws apart from others of the same seed


def merged(
    clients: Sequence[ServeGenClient], *, seed: int, rate_scale: float, most_tokens: int | None, left_out: LeftOut
) -> Iterator[WorkloadRequest]:
    """The requests of all clients in order of arrival, since the first window's start; ties go by client.

    One of more than `most_tokens` is drawn, but counted in `left_out` instead.
    """
    origin = min(client.rates[0].start for client in clients)
    streams = [
        _requests(client, origin, np.random.default_rng((_STREAM, seed, number)), rate_scale)
        for number, client in enumerate(clients)
    ]
    for request in heapq.merge(*streams, key=lambda request: request.arrival):
        if most_tokens is None or request.num_prompt_tokens + request.num_output_tokens <= most_tokens:
            yield request
        else:
            left_out.too_long += 1


def _requests(
    client: ServeGenClient, origin: float, random: np.random.Generator, rate_scale: float
) -> Iterator[WorkloadRequest]:
    arrivals, lengths = random.spawn(2)
    drawn = _LengthDraws(lengths)
    for time in _times(client.rates, arrivals, rate_scale):
        prompt, output = drawn.next_of(client.lengths_at(time))
        yield WorkloadRequest(
            arrival=time - origin, num_prompt_tokens=prompt, num_output_tokens=output, client=client.name
        )


def _times(windows: Sequence[RateWindow], random: np.random.Generator, rate_scale: float) -> Iterator[float]:
    """A renewal process whose clock runs as fast as the rate of the moment: gaps of mean 1 in a window's distribution.

    So a gap may reach over windows, also over those in which nothing comes, and the mean number of requests in each is
    its rate times its length.
    """
    ends = [*(window.start for window in windows[1:]), _last_end(windows)]
    gaps = _GapDraws(random)
    left: float | None = None  # of the gap that has begun
    for window, end in zip(windows, ends, strict=True):
        now, rate = window.start, window.rate * rate_scale
        if not rate:
            continue
        while True:
            if left is None:
                left = gaps.next_of(window)
            if now + left / rate >= end:
                left -= (end - now) * rate
                left = max(left, 0.0)
                break
            now += left / rate
            yield now
            left = None


def _last_end(windows: Sequence[RateWindow]) -> float:
    """Windows are equally long; a single one has the 600 s that ServeGen measured in."""
    length = windows[-1].start - windows[-2].start if len(windows) > 1 else 600.0
    return windows[-1].start + length


class _GapDraws:
    """Times between requests, of mean 1."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._window: RateWindow | None = None
        self._drawn: Iterator[float] = iter(())

    def next_of(self, window: RateWindow) -> float:
        if window is not self._window:
            self._window, self._drawn = window, iter(())
        gap = next(self._drawn, None)
        if gap is None:
            self._drawn = iter(_gaps(self._random, window).tolist())
            gap = next(self._drawn)
        return gap


def _gaps(random: np.random.Generator, window: RateWindow) -> NDArray[np.float64]:
    if window.pattern == "Gamma":
        return random.gamma(window.shape, 1 / window.shape, _CHUNK)
    # The mean of a Weibull distribution of scale 1 is gamma(1 + 1 / shape), which a small shape makes infinite.
    logarithms = np.log(random.standard_exponential(_CHUNK)) / window.shape - math.lgamma(1 + 1 / window.shape)
    return np.exp(np.minimum(logarithms, 700.0))


class _LengthDraws:
    """Prompt and output lengths, which ServeGen's files give independently of each other."""

    def __init__(self, random: np.random.Generator) -> None:
        self._random = random
        self._window: LengthWindow | None = None
        self._drawn: Iterator[tuple[int, int]] = iter(())

    def next_of(self, window: LengthWindow) -> tuple[int, int]:
        if window is not self._window:
            self._window, self._drawn = window, iter(())
        pair = next(self._drawn, None)
        if pair is None:
            columns = []
            for lengths in (window.prompt, window.output):
                places = np.searchsorted(lengths.cumulative, self._random.random(_CHUNK), side="right")
                columns.append(lengths.values[np.minimum(places, len(lengths.values) - 1)].tolist())
            self._drawn = zip(*columns, strict=True)
            pair = next(self._drawn)
        return pair
