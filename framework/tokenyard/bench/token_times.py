"""TokenTimes: the time between the tokens of each request, watched at the engine's steps."""

from __future__ import annotations

import logging
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.interfaces.engine_core import EngineCore

logger = logging.getLogger(__name__)


class TokenTimes:
    """Watches an engine from now on; the engine behaves as before.

    Several tokens of one step came at once, and count as one.
    """

    def __init__(self, core: EngineCore) -> None:
        self.gaps: list[float] = []  # seconds, of all requests in the order of the steps
        self._last: dict[str, float] = {}  # of the requests that have not ended
        step = core.step

        def watched() -> EngineCoreOutputs:
            outputs = step()
            self._take(outputs, perf_counter())
            return outputs

        try:
            core.step = watched  # type: ignore[method-assign]
        except AttributeError:  # a class with __slots__ and without __dict__
            logger.warning("%s cannot be watched: nothing is known of the time between tokens", type(core).__name__)

    def _take(self, outputs: EngineCoreOutputs, now: float) -> None:
        last = self._last
        self.gaps += [now - last[request_id] for request_id in outputs.request_ids if request_id in last]
        last.update(dict.fromkeys(outputs.request_ids, now))
        for end in outputs.finished:
            last.pop(end.request_id, None)
