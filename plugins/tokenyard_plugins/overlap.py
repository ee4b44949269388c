"""`engine=overlap`: step n+1 is scheduled while step n executes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard import EngineCoreDescriptor, hookimpl

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import EngineCore, EngineCoreContext

STEPS_IN_FLIGHT = 2


def _make(options: NoOptions, context: EngineCoreContext) -> EngineCore:
    from tokenyard.engine.overlap import OverlapEngineCore  # only when chosen

    return OverlapEngineCore(context, depth=STEPS_IN_FLIGHT)


@hookimpl
def tokenyard_engine_cores() -> Iterator[EngineCoreDescriptor[NoOptions]]:
    yield EngineCoreDescriptor(
        name="overlap",
        api_version=(1, 7),
        summary="step n+1 is scheduled while step n executes; same tokens as sync",
        factory=_make,
        steps_in_flight=STEPS_IN_FLIGHT,
    )
