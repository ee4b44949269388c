"""`latency=linear`: a step's time grows with its tokens, and with the K/V that its decodes read."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.errors import ConfigError
from tokenyard.interfaces import LatencyModel

if TYPE_CHECKING:
    from tokenyard.interfaces import LatencyModelContext, StepLoad


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearOptions:
    """Options of `latency=linear`, in seconds."""

    per_step: float  # of a step, whatever it computes
    per_token: float  # of each token that it computes, of prefills and decodes
    per_context_token: float = 0.0  # of each K/V token that a decode reads

    def __post_init__(self) -> None:
        if not 0 < self.per_step < math.inf:  # also refuses NaN
            raise ConfigError(f"latency.per_step={self.per_step} is not valid: it must be a number of seconds above 0")
        for name, value in (("per_token", self.per_token), ("per_context_token", self.per_context_token)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"latency.{name}={value} is not valid: it must be a number of seconds, at least 0")


class LinearLatency(LatencyModel):
    """Weights are read once a step, K/V once a decode, and every token is multiplied with all weights."""

    def __init__(self, options: LinearOptions, max_num_batched_tokens: int) -> None:
        most = options.per_step + (options.per_token + options.per_context_token) * max_num_batched_tokens
        if not most < math.inf:
            raise ConfigError(
                f"latency.per_step={options.per_step}, latency.per_token={options.per_token} and "
                f"latency.per_context_token={options.per_context_token} are too large: a step of "
                f"{max_num_batched_tokens} tokens (scheduler.max_num_batched_tokens) has no finite time; lower them"
            )
        self._per_step = options.per_step
        self._per_token = options.per_token
        self._per_context_token = options.per_context_token

    def step_seconds(self, load: StepLoad) -> float:
        reads = self._per_context_token * load.num_decode_context_tokens
        return self._per_step + self._per_token * load.num_tokens + reads


def _make(options: LinearOptions, context: LatencyModelContext) -> LatencyModel:
    return LinearLatency(options, context.max_num_batched_tokens)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[LinearOptions]]:
    yield ComponentDescriptor(
        component_kind="latency",
        name="linear",
        api_version=(1, 7),
        summary="seconds of a step: a constant, and so much for each token and for each K/V token that a decode reads",
        options_type=LinearOptions,
        factory=_make,
    )
