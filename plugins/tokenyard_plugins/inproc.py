"""`executor=inproc`: one worker in the engine's own process."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard import ExecutorDescriptor, hookimpl

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import Executor, ExecutorContext


def _make(options: NoOptions, context: ExecutorContext) -> Executor:
    from tokenyard.executor.inproc import InProcessExecutor  # only when chosen

    return InProcessExecutor(context)


@hookimpl
def tokenyard_executors() -> Iterator[ExecutorDescriptor[NoOptions]]:
    yield ExecutorDescriptor(
        name="inproc", api_version=(1, 7), summary="one worker in the engine's own process", factory=_make
    )
