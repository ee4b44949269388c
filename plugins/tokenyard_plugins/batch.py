"""`scheduler=batch` and the mechanism under every policy: continuous batching with chunked prefill."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard import SchedulerDescriptor, hookimpl

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import Scheduler, SchedulerContext


def _make(options: NoOptions, context: SchedulerContext) -> Scheduler:
    from tokenyard.scheduler import BatchScheduler  # only when chosen

    return BatchScheduler(context)


@hookimpl
def tokenyard_schedulers() -> Iterator[SchedulerDescriptor[NoOptions]]:
    yield SchedulerDescriptor(
        name="batch",
        api_version=(1, 7),
        summary="continuous batching under one token budget, steered by a policy",
        factory=_make,
        takes_policy=True,
    )
