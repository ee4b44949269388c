"""`executor=simulated`: no model; a step takes as long as the latency model says, in virtual time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard import ExecutorDescriptor, hookimpl

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import Executor, ExecutorContext


def _make(options: NoOptions, context: ExecutorContext) -> Executor:
    from tokenyard.executor.simulated import SimulatedExecutor  # only when chosen

    return SimulatedExecutor(context)


@hookimpl
def tokenyard_executors() -> Iterator[ExecutorDescriptor[NoOptions]]:
    yield ExecutorDescriptor(
        name="simulated",
        api_version=(1, 7),
        summary="no model: steps take as long as the latency model says, in virtual time",
        factory=_make,
        is_simulated=True,
    )
