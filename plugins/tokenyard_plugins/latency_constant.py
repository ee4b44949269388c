"""`latency=constant`: every step takes the same time."""

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
class ConstantOptions:
    """Options of `latency=constant`."""

    per_step: float  # seconds

    def __post_init__(self) -> None:
        if not 0 < self.per_step < math.inf:  # also refuses NaN
            raise ConfigError(f"latency.per_step={self.per_step} is not valid: it must be a number of seconds above 0")


class ConstantLatency(LatencyModel):
    """For tests, and for simulations in which only the order of things matters."""

    def __init__(self, per_step: float) -> None:
        self._per_step = per_step

    def step_seconds(self, load: StepLoad) -> float:
        return self._per_step


def _make(options: ConstantOptions, context: LatencyModelContext) -> LatencyModel:
    return ConstantLatency(options.per_step)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[ConstantOptions]]:
    yield ComponentDescriptor(
        component_kind="latency",
        name="constant",
        api_version=(1, 7),
        summary="seconds of a step: always the same",
        options_type=ConstantOptions,
        factory=_make,
    )
