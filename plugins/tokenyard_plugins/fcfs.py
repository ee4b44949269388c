"""`scheduler=fcfs`: first come, first served - what every decision point defaults to (Orca, OSDI 2022)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import SchedulingPolicy

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import PolicyContext


class FCFSPolicy(SchedulingPolicy):
    """Requests are admitted in order of arrival; a preempted one goes back to the front."""


def _make(options: NoOptions, context: PolicyContext) -> SchedulingPolicy:
    return FCFSPolicy()


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[NoOptions]]:
    yield PolicyDescriptor(name="fcfs", api_version=(1, 7), summary="first come, first served", factory=_make)
