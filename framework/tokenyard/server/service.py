"""Service: what all routes of a server share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, cast

from tokenyard.errors import EngineDeadError
from tokenyard.server.chat_template import server_template
from tokenyard.server.flow import FlowControl
from tokenyard.server.observation import Observation
from tokenyard.server.unknown_fields import UnknownFields

if TYPE_CHECKING:
    from starlette.requests import HTTPConnection

    from tokenyard.async_llm import AsyncLLM
    from tokenyard.config import EngineConfig


class EngineState(str, Enum):
    """Of the engine behind a server."""

    STARTING = "starting"  # for the first time, or again
    READY = "ready"
    DEAD = "dead"  # for good: the server is about to end

    def __str__(self) -> str:
        return self.value


@dataclass(slots=True, kw_only=True)
class Service:
    """One server: its settings, and the engine behind it, which comes after the server and may go before it.

    Belongs to the event loop: nothing else changes it.
    """

    config: EngineConfig
    llm: AsyncLLM | None = None  # None while it starts, or when it has died
    state: EngineState = EngineState.READY
    phase: str = ""  # what a start is at, in words
    percent: int = 0  # of the start, roughly
    is_draining: bool = False  # no new requests
    is_stalled: bool = False  # there is work, and no step for `server.stall_timeout`
    num_open: int = 0  # POST requests whose answers have not ended
    started_at: int = field(default_factory=lambda: int(time.time()))  # Unix seconds
    unknown_fields: UnknownFields = field(default_factory=UnknownFields)
    flow: FlowControl = field(init=False)
    observation: Observation = field(init=False)  # numbers, timelines, log lines, spans, the watchdog
    chat_template: str | None = field(init=False)  # the text of server.chat_template

    def __post_init__(self) -> None:
        self.chat_template = server_template(self.config.server)
        self.flow = FlowControl(self)
        self.observation = Observation(self.config, self.model_names[0])
        if self.llm is not None:
            self.observation.attach(self.llm)

    def set_engine(self, llm: AsyncLLM | None, state: EngineState) -> None:
        """There is another engine from now on, or none."""
        self.llm, self.state = llm, state
        if llm is not None:
            self.observation.attach(llm)

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may use; the first one stands in answers."""
        return self.config.server.served_model_names or (self.config.model.name,)

    @property
    def engine(self) -> AsyncLLM:
        """The engine; EngineDeadError (503) where there is none."""
        if self.llm is None:
            raise EngineDeadError(f"the engine is {self.state}; try again later")
        return self.llm


def service_of(http: HTTPConnection) -> Service:
    """The service that a route belongs to."""
    return cast("Service", http.app.state.service)


def request_id_of(http: HTTPConnection) -> str:
    """This server's own id of an HTTP request: unique, 32 hexadecimal digits."""
    return cast("str", http.scope["state"]["request_id"])


def api_key_id_of(http: HTTPConnection) -> str | None:
    """Names the API key of a request without giving it away; None where no keys are asked for."""
    return cast("str | None", http.scope["state"].get("api_key_id"))
