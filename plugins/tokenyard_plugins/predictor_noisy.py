"""`scheduler.predictor=noisy`: the true output lengths with an error of a chosen size, as a learnt predictor has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from statistics import NormalDist
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.errors import PluginError
from tokenyard.interfaces import OutputLengthPredictor, possible_output_len

if TYPE_CHECKING:
    from tokenyard.interfaces import PredictorContext, RequestView

MAX_SIGMA = 10.0
_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True, kw_only=True)
class NoisyOptions:
    """Options of `scheduler.predictor={name: noisy, sigma: 0.5}`."""

    sigma: float = 0.5  # standard deviation of the logarithm of predicted / true length; 0 = no error

    def __post_init__(self) -> None:
        if not 0 <= self.sigma <= MAX_SIGMA:  # also refuses NaN
            raise ValueError(
                f"sigma={self.sigma} is not valid: it must be a number from 0 to {MAX_SIGMA:g}, 0 = no error"
            )


class NoisyPredictor(OutputLengthPredictor):
    """The truth times a lognormal factor of median 1 that depends on the seed and the request's id alone.

    So it says the same in every run, whatever was asked before. The quantiles are those of the truth, given what was
    predicted: lognormal around it.
    """

    def __init__(self, truth: Callable[[RequestView], int], *, sigma: float, seed: int) -> None:
        self._truth = truth
        self._sigma = sigma
        self._seed = seed

    def output_len(self, request: RequestView) -> float:
        return possible_output_len(request, self._guess(request))

    def quantile(self, request: RequestView, q: float) -> float:
        """`q` is from 0 to 1; raises ValueError."""
        if not 0 <= q <= 1:
            raise ValueError(f"a quantile is of a probability from 0 to 1; got {q!r}")
        spread = _normal_quantile(q) * self._sigma if self._sigma else 0.0
        return possible_output_len(request, self._guess(request) * math.exp(spread))

    def _guess(self, request: RequestView) -> float:
        digest = blake2b(f"{self._seed}/{request.request_id}".encode(errors="surrogatepass"), digest_size=8).digest()
        share = ((int.from_bytes(digest, "big") >> 12) + 0.5) / 2**52  # never 0 or 1
        return self._truth(request) * math.exp(self._sigma * _NORMAL.inv_cdf(share))


def _normal_quantile(q: float) -> float:
    if q in (0, 1):
        return math.inf if q else -math.inf
    return _NORMAL.inv_cdf(q)


def _make(options: NoisyOptions, context: PredictorContext) -> OutputLengthPredictor:
    if context.true_output_tokens is None:
        raise PluginError(
            "predictor 'noisy' was not given the true lengths: PredictorContext.true_output_tokens is None"
        )
    return NoisyPredictor(context.true_output_tokens, sigma=options.sigma, seed=context.seed)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[NoisyOptions]]:
    yield ComponentDescriptor(
        component_kind="predictor",
        name="noisy",
        api_version=(1, 7),
        summary="output lengths: the truth times a lognormal error of a chosen size",
        options_type=NoisyOptions,
        factory=_make,
    )
