"""When the requests of an open loop are sent."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def send_times(count: int, rate: float, burstiness: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """Seconds from the start, one for each request, in order; all 0 with an infinite rate.

    The pauses follow a gamma law of shape `burstiness` (1 = a Poisson process; infinite = even), and are then scaled so
    that they add up to `count / rate`: a run is as long as its rate says, whatever was drawn.
    """
    if math.isinf(rate):
        return np.zeros(count)
    pauses = np.ones(count) if math.isinf(burstiness) else rng.gamma(burstiness, 1.0, count)
    times = np.cumsum(pauses)
    if times[-1] <= 0:  # a shape so small that every draw has underflown: all of them at the end
        return np.full(count, count / rate)
    scaled: NDArray[np.float64] = times * (count / rate / times[-1])
    return scaled
