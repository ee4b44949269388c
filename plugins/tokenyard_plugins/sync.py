"""`engine=sync`: schedule, execute, update - one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard import EngineCoreDescriptor, hookimpl

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import EngineCore, EngineCoreContext


def _make(options: NoOptions, context: EngineCoreContext) -> EngineCore:
    from tokenyard.engine.sync import SyncEngineCore  # only when chosen

    return SyncEngineCore(context)


@hookimpl
def tokenyard_engine_cores() -> Iterator[EngineCoreDescriptor[NoOptions]]:
    yield EngineCoreDescriptor(
        name="sync", api_version=(1, 7), summary="schedule, execute, update: one step at a time", factory=_make
    )
