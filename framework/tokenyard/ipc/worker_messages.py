"""What an executor and its worker processes tell each other besides steps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

import msgspec

from tokenyard.ipc.codec import Codec
from tokenyard.ipc.failures import ErrorMessage
from tokenyard.ipc.messages import ComponentMessage, Identity
from tokenyard.ipc.reports import PlanMessage, ReportMessage
from tokenyard.ipc.steps import StepMessage, StepResultMessage


class CallMessage(msgspec.Struct, frozen=True, tag="call"):
    """Call a published function."""

    name: str
    arguments: tuple[object, ...]


class ReturnMessage(msgspec.Struct, frozen=True, tag="return"):
    """What a call returned; of a plan, None."""

    value: object = None


class ProgressMessage(msgspec.Struct, frozen=True, tag="progress"):
    """The phase a long start is in."""

    text: str


class RefusalMessage(msgspec.Struct, frozen=True, tag="refusal"):
    """A call raised; the worker goes on."""

    error: ErrorMessage


class FailureMessage(msgspec.Struct, frozen=True, tag="failure"):
    """A worker cannot go on."""

    error: ErrorMessage
    is_lost_rank: bool = False  # another rank is gone; what it said itself, or how it ended, says more


class JoinMessage(msgspec.Struct, frozen=True, tag="join"):
    """The first message to a worker: what it is part of."""

    identity: Identity
    components: list[ComponentMessage]
    config: Mapping[str, object]  # see `tokenyard.ipc.config_values`
    rank: int
    num_ranks: int
    folder: str  # where the ranks meet
    collective_timeout: float  # seconds
    root_log_level: int
    log_level: int  # of the logger `tokenyard`
    log_format: str  # of the root logger, in terms of `logging`


ToWorker: TypeAlias = JoinMessage | PlanMessage | StepMessage | CallMessage
FromWorker: TypeAlias = (
    ProgressMessage | ReportMessage | StepResultMessage | ReturnMessage | RefusalMessage | FailureMessage
)


def to_worker_codec() -> Codec[ToWorker]:
    """Of messages to a worker."""
    return Codec((JoinMessage, PlanMessage, StepMessage, CallMessage))


def from_worker_codec() -> Codec[FromWorker]:
    """Of messages from a worker."""
    return Codec((ProgressMessage, ReportMessage, StepResultMessage, ReturnMessage, RefusalMessage, FailureMessage))
