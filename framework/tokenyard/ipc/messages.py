"""All messages between a front end and an engine in a process of its own; WIRE_VERSION counts their changes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import msgspec

from tokenyard.ipc.codec import Codec
from tokenyard.ipc.failures import ErrorMessage
from tokenyard.ipc.outputs import OutputsMessage, StatsMessage
from tokenyard.ipc.reports import ReportMessage
from tokenyard.ipc.requests import RequestMessage
from tokenyard.request import FinishReason

WIRE_VERSION = 1

# Both ways


class ComponentMessage(msgspec.Struct, frozen=True, array_like=True):
    """A component that a process's plugins provide, and who provides it."""

    kind: str
    name: str
    distribution: str
    version: str


class Identity(msgspec.Struct, frozen=True):
    """What both ends must agree on."""

    wire_version: int
    tokenyard_version: str
    plugin_api: tuple[int, int]


# Front end -> engine


class Launch(msgspec.Struct, frozen=True, tag="launch"):
    """The first message: what the engine is to be."""

    identity: Identity
    config: Mapping[str, object]  # see `tokenyard.ipc.config_values`
    components: list[ComponentMessage]
    root_log_level: int
    log_level: int  # of the logger `tokenyard`
    log_format: str  # of the root logger, in terms of `logging`


class AddRequests(msgspec.Struct, frozen=True, tag="add"):
    """Queue requests, all or none."""

    requests: list[RequestMessage]
    call_id: int | None = None  # asks for an Answer; without one only a refusal is told


class FinishRequests(msgspec.Struct, frozen=True, tag="finish"):
    """End requests; unknown ones are ignored."""

    request_ids: list[str]
    reason: FinishReason


class Call(msgspec.Struct, frozen=True, tag="call"):
    """A question or a command that is answered."""

    call_id: int
    name: Literal["reset_prefix_cache", "stats", "pause", "resume", "health", "settle"]
    mode: Literal["keep", "wait", "abort"] = "keep"  # of a pause


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End after the step that runs."""


# Engine -> front end


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The first message: who is there."""

    identity: Identity


class StartPhase(msgspec.Struct, frozen=True, tag="phase"):
    """What a start is at, for people."""

    text: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The engine takes requests."""

    report: ReportMessage
    max_model_len: int
    num_blocks: int
    commit: str | None  # of the model's files


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """Requests of one `AddRequests` that were not queued, none of them."""

    request_ids: list[str]
    error: ErrorMessage


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Of a Call, or of an AddRequests that asked for one."""

    call_id: int
    error: ErrorMessage | None = None
    value: bool | None = None  # of reset_prefix_cache
    stats: StatsMessage | None = None
    request_ids: list[str] = []  # that a pause has ended
    num_dropped_frames: int = 0  # of health


class Died(msgspec.Struct, frozen=True, tag="died"):
    """The engine did not start, or ended on an error; the last message."""

    error: ErrorMessage


class Ended(msgspec.Struct, frozen=True, tag="ended"):
    """The engine was stopped; the last message."""


ToEngine = Launch | AddRequests | FinishRequests | Call | Stop
FromEngine = Hello | StartPhase | Ready | OutputsMessage | Refused | Answer | Died | Ended


def to_engine_codec() -> Codec[ToEngine]:
    """For what a front end sends."""
    return Codec[ToEngine]((Launch, AddRequests, FinishRequests, Call, Stop))


def from_engine_codec() -> Codec[FromEngine]:
    """For what an engine sends."""
    return Codec[FromEngine]((Hello, StartPhase, Ready, OutputsMessage, Refused, Answer, Died, Ended))
