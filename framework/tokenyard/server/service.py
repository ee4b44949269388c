"""Service: what all routes of a server share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.errors import EngineDeadError

if TYPE_CHECKING:
    from tokenyard.async_llm import AsyncLLM
    from tokenyard.config import EngineConfig


@dataclass(slots=True, kw_only=True)
class Service:
    """One server: its settings, and the engine behind it, which comes after the server and may go before it."""

    config: EngineConfig
    llm: AsyncLLM | None = None  # None while it starts, or when it has died
    is_draining: bool = False  # no new requests

    @property
    def model_names(self) -> tuple[str, ...]:
        """The names that requests may use; the first one stands in answers."""
        return self.config.server.served_model_name or (self.config.model.name,)

    @property
    def engine(self) -> AsyncLLM:
        """The engine; EngineDeadError (503) where there is none."""
        if self.llm is None:
            raise EngineDeadError("the engine is not running; try again later")
        return self.llm
