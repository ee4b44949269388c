"""RequestListener: who is told what becomes of a front end's requests."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.engine.open_requests import OpenRequest
    from tokenyard.engine_outputs import EngineCoreOutputs

logger = logging.getLogger(__name__)


class RequestListener(Protocol):
    """Called under the lock of the client that holds the requests, one call at a time: quick, and without waiting.

    Every request that was `added` is `ended` once, or `lost`. What a method raises switches the listener off.
    """

    def added(self, request: OpenRequest) -> None:
        """A request is about to go to the engine; in the coroutine or thread that asked for it."""

    def stepped(self, outputs: EngineCoreOutputs, num_new_tokens: int, now: float) -> None:
        """One step's results, of which `num_new_tokens` were taken; `now` is in engine-clock seconds."""

    def ended(self, request: OpenRequest, now: float | None) -> None:
        """All its choices have ended; `now` None: its user left before, and those without a reason are aborted."""

    def lost(self, request_ids: Sequence[str], error: Exception) -> None:
        """These were refused, or the engine ended under them, and why; `ended` comes for none of them."""


class GuardedListener:
    """Nothing that a listener does reaches the step that it is told of."""

    __slots__ = ("_listener",)

    def __init__(self, listener: RequestListener) -> None:
        self._listener: RequestListener | None = listener

    def added(self, request: OpenRequest) -> None:
        if self._listener is not None:
            try:
                self._listener.added(request)
            except Exception:
                self._switch_off()

    def stepped(self, outputs: EngineCoreOutputs, num_new_tokens: int, now: float) -> None:
        if self._listener is not None:
            try:
                self._listener.stepped(outputs, num_new_tokens, now)
            except Exception:
                self._switch_off()

    def ended(self, request: OpenRequest, now: float | None) -> None:
        if self._listener is not None:
            try:
                self._listener.ended(request, now)
            except Exception:
                self._switch_off()

    def lost(self, request_ids: Sequence[str], error: Exception) -> None:
        if self._listener is not None:
            try:
                self._listener.lost(request_ids, error)
            except Exception:
                self._switch_off()

    def _switch_off(self) -> None:
        logger.warning("%s failed and is switched off", type(self._listener).__name__, exc_info=True)
        self._listener = None
