"""OutputLengthPredictor: how long a request's output will be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.interfaces.policy import RequestView

COMPONENT_KIND = "predictor"
"""`ComponentDescriptor.component_kind` of output-length predictors, chosen by `scheduler.predictor=NAME`."""

ORACLES = frozenset({"oracle", "noisy"})
"""Names of the predictors that may be told the truth: nobody else is, so a schedule that used it says so by name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictorContext:
    """What a predictor's factory is given, in the engine process."""

    seed: int
    # The true number of output tokens, where the workload told it: of a simulation, or a benchmark. Otherwise the
    # request's limit, which is the truth where nothing but the limit ends it. None for predictors that are no oracle.
    true_output_tokens: Callable[[RequestView], int] | None = None


class OutputLengthPredictor(ABC):
    """Asked by policies through their view, in the engine process, from one thread (since API 1.6).

    Predictions may depend on nothing but the request, what was finished so far and the seed: two calls without an event
    between them give the same number. A request that lives has at least one more token to come, and none beyond its
    limit: see `possible_output_len`.
    """

    @abstractmethod
    def output_len(self, request: RequestView) -> float:
        """Expected number of output tokens in all, those delivered already included; at least 1."""

    def quantile(self, request: RequestView, q: float) -> float:
        """The output is at most that long with probability `q`; a predictor without a distribution says one number."""
        return self.output_len(request)

    def on_finish(self, request: RequestView) -> None:  # noqa: B027 - many do not learn
        """A request has ended by itself, with `num_output_tokens`: for predictors that learn."""


def possible_output_len(request: RequestView, length: float) -> float:
    """`length`, or the nearest number of output tokens that a request which has not ended can have (since API 1.6)."""
    return max(request.num_output_tokens + 1, min(length, request.max_output_tokens))
