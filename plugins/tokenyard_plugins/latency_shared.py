"""`latency=shared`: a step takes as long for each request in it, as if they took turns."""

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
class SharedOptions:
    """Options of `latency=shared`."""

    per_request: float  # seconds, of each request in a step, whatever it computes

    def __post_init__(self) -> None:
        if not 0 < self.per_request < math.inf:  # also refuses NaN
            raise ConfigError(
                f"latency.per_request={self.per_request} is not valid: it must be a number of seconds above 0"
            )


class SharedLatency(LatencyModel):
    """Batching gains nothing: a server that is shared in equal parts, the processor sharing of queueing theory."""

    def __init__(self, per_request: float) -> None:
        self._per_request = per_request

    def step_seconds(self, load: StepLoad) -> float:
        return self._per_request * (load.num_decodes + load.num_prefills)


def _make(options: SharedOptions, context: LatencyModelContext) -> LatencyModel:
    if not options.per_request * context.max_num_batched_tokens < math.inf:
        raise ConfigError(
            f"latency.per_request={options.per_request} is too large: a step of {context.max_num_batched_tokens} "
            "requests (scheduler.max_num_batched_tokens) has no finite time; lower it"
        )
    return SharedLatency(options.per_request)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[SharedOptions]]:
    yield ComponentDescriptor(
        component_kind="latency",
        name="shared",
        api_version=(1, 7),
        summary="seconds of a step: so many for each request in it, as when a processor is shared",
        options_type=SharedOptions,
        factory=_make,
    )
