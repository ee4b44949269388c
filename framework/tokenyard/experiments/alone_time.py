"""AloneTime: how long requests would take on an idle server, by the latency model; what slowdown is measured by."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.experiments.metrics_statistics import pieces
from tokenyard.interfaces.latency import StepLoad

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from tokenyard.config import SchedulerConfig
    from tokenyard.experiments.metrics_statistics import Floats
    from tokenyard.interfaces.latency import LatencyModel

_STRIDE = 256  # tokens of context between two that are always asked for
_TOLERANCE = 1e-9  # relative, of what a straight line may be off half-way


class AloneTime:
    """Satisfies `tokenyard.experiments.metrics_latency.AloneSeconds`.

    Alone means: chunks of the prompt as large as the scheduler's limits allow, nothing of it cached, then a step for
    each further token. All prefill steps are the model's own times. Decode steps are summed over every context, which
    is asked for at multiples of 256 tokens and half-way between them, and more finely where the model is not straight:
    exact for models that are linear in the context, or in pieces that do not bend twice within 128 tokens.
    """

    def __init__(self, model: LatencyModel, scheduler: SchedulerConfig) -> None:
        self._model = model
        self._chunk = _chunk_tokens(scheduler)

    def __call__(self, prompt: NDArray[np.int32], output: NDArray[np.int32]) -> Floats:
        """[N] seconds of requests of so many prompt and output tokens; NaN for those without output."""
        seconds = np.full(len(prompt), np.nan)
        if not output.any():
            return seconds
        lengths = np.unique(prompt)
        prefill = self._prefill_seconds(lengths)
        first, last = int(lengths[0]), max(int((prompt[piece] + output[piece]).max()) for piece in pieces(len(prompt)))
        upto = self._decode_seconds_upto(first, last)
        for piece in pieces(len(prompt)):
            prompts, outputs = prompt[piece], output[piece]
            ends = np.where(outputs > 0, prompts + outputs - 1, prompts)  # decodes have the contexts prompt .. end - 1
            decode = upto[ends - first] - upto[prompts - first]
            seconds[piece] = np.where(outputs > 0, prefill[np.searchsorted(lengths, prompts)] + decode, np.nan)
        return seconds

    def _prefill_seconds(self, lengths: NDArray[np.int32]) -> Floats:
        """[L] of whole prompts, `lengths` ascending: full chunks that many prompts share, then what is left."""
        full: list[float] = [0.0]  # seconds of so many full chunks
        found = np.empty(len(lengths))
        for index, length in enumerate(lengths.tolist()):
            chunk = self._chunk or length
            num_full = (length - 1) // chunk  # the last chunk, full or not, stands apart
            while len(full) <= num_full:
                full.append(full[-1] + self._chunk_seconds(chunk, (len(full) - 1) * chunk))
            found[index] = full[num_full] + self._chunk_seconds(length - num_full * chunk, num_full * chunk)
        return found

    def _chunk_seconds(self, num_tokens: int, context: int) -> float:
        if num_tokens == 1 and context:  # the last token of a prompt runs as a decode
            return self._decode_seconds(context)
        return self._model.step_seconds(
            StepLoad(num_prefills=1, num_prefill_tokens=num_tokens, num_prefill_context_tokens=context)
        )

    def _decode_seconds(self, context: int) -> float:
        return self._model.step_seconds(StepLoad(num_decodes=1, num_decode_context_tokens=context))

    def _decode_seconds_upto(self, first: int, last: int) -> Floats:
        """[last - first + 1] seconds of decodes with contexts from `first` to before each."""
        contexts = np.arange(first, last)
        if not len(contexts):
            return np.zeros(1)
        knots, seconds = _knots(self._decode_seconds, first, last - 1)
        return np.concatenate(([0.0], np.cumsum(np.interp(contexts, knots, seconds))))


def _chunk_tokens(scheduler: SchedulerConfig) -> int | None:
    """Most tokens of one request in a step; None = its whole prompt."""
    if not scheduler.enable_chunked_prefill:
        return None
    budget = scheduler.max_num_batched_tokens
    return min(scheduler.long_prefill_token_threshold or budget, budget)


def _knots(function: Callable[[int], float], first: int, last: int) -> tuple[list[int], list[float]]:
    """Points between which the function is near enough to straight, in order."""
    known = {point: function(point) for point in {*range(first, last, _STRIDE), last}}
    pieces = list(pairwise(sorted(known)))
    while pieces:
        left, right = pieces.pop()
        middle = (left + right) // 2
        if middle == left:
            continue
        straight = known[left] + (known[right] - known[left]) * (middle - left) / (right - left)
        known[middle] = function(middle)
        if abs(known[middle] - straight) > _TOLERANCE * abs(straight):
            pieces += [(left, middle), (middle, right)]
    points = sorted(known)
    return points, [known[point] for point in points]
