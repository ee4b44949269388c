"""RemoteEngine: an engine in a process of its own, for a front end that drives one in its own thread."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.engine_outputs import EngineCoreOutputs
from tokenyard.errors import EngineDeadError
from tokenyard.interfaces.engine_core import EngineCore, PauseMode

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.engine.process_link import EngineProcessLink
    from tokenyard.engine_outputs import SchedulerStats
    from tokenyard.request import EngineCoreRequest, FinishReason

_NO_TOKENS = np.empty(0, dtype=np.int32)
_NOTHING_NEW = EngineCoreOutputs(request_ids=(), num_tokens=_NO_TOKENS, token_ids=_NO_TOKENS)
_NOTHING_RAN = EngineCoreOutputs(request_ids=(), num_tokens=_NO_TOKENS, token_ids=_NO_TOKENS, did_run=False)


class RemoteEngine(EngineCore):
    """EngineCore for one driving thread: `step` waits for the next outputs of an engine that steps by itself.

    So requests run from the moment at which they are added. Its other methods may be called from any thread.
    """

    def __init__(self, link: EngineProcessLink) -> None:
        self._link = link
        self._arrived: queue.SimpleQueue[EngineCoreOutputs | None] = queue.SimpleQueue()  # None = no more come
        self._death: EngineDeadError | None = None
        self._alive: dict[str, None] = {}  # requests whose end was not told yet
        self._is_settled = True  # nothing of requests that were ended from here can be in flight
        self._is_paused = False
        link.begin(self)

    # As EngineCore

    def add_request(self, request: EngineCoreRequest) -> None:
        self.add_requests([request])

    def add_requests(self, requests: Sequence[EngineCoreRequest]) -> None:
        """Queue requests in one message, all or none."""
        added = dict.fromkeys(request.request_id for request in requests if request.request_id not in self._alive)
        self._alive |= added  # before: a Ctrl-C in the wait leaves them to whoever ends them
        try:
            self._link.add_and_wait(requests)
        except Exception:
            self._forget(tuple(added))
            raise

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        if isinstance(request_ids, str):
            raise TypeError(f"finish_requests takes a list of request ids; got the string {request_ids!r}")
        alive = [request_id for request_id in dict.fromkeys(request_ids) if request_id in self._alive]
        self._link.finish(alive, reason)
        self._forget(alive)
        self._is_settled = self._is_settled and not alive
        return alive

    def step(self) -> EngineCoreOutputs:
        """Waits for the outputs of one step. `did_run=False`: the engine is paused, and there are none."""
        if not self._alive:
            self._settle()
            return _NOTHING_NEW
        if self._is_paused and self._arrived.empty():
            return _NOTHING_RAN
        outputs = self._arrived.get()
        if outputs is None:
            self._arrived.put(None)  # for whoever asks next
            raise self._dead()
        self._forget([end.request_id for end in outputs.finished])
        return outputs

    def has_requests(self) -> bool:
        return bool(self._alive) or not self._is_settled

    def wake_at(self) -> float | None:
        return None  # the engine wakes up by itself

    def pause(self, mode: PauseMode = PauseMode.KEEP) -> Sequence[str]:
        ended = self._link.pause(mode)
        self._is_paused = True
        self._forget(ended)
        return ended

    def resume(self) -> None:
        self._link.resume()
        self._is_paused = False

    @property
    def is_paused(self) -> bool:
        return self._is_paused

    def reset_prefix_cache(self) -> bool:
        return self._link.reset_prefix_cache()

    def stats(self) -> SchedulerStats:
        return self._link.stats()

    def shutdown(self) -> None:
        self._link.stop()

    # As the link's listener, in its thread

    def deliver(self, outputs: EngineCoreOutputs) -> Sequence[str]:
        self._arrived.put(outputs)
        return ()

    def refuse(self, request_ids: Sequence[str], error: Exception) -> None:
        pass  # `add_and_wait` raises it

    def end(self, failure: BaseException | None) -> None:
        if isinstance(failure, EngineDeadError):
            self._death = failure
        self._arrived.put(None)

    # Helpers

    def _forget(self, request_ids: Sequence[str]) -> None:
        for request_id in request_ids:
            self._alive.pop(request_id, None)

    def _settle(self) -> None:
        """Let the last steps of requests land that were ended from here, so that they hold no blocks."""
        self._is_settled = True
        if self._death is not None:
            raise self._dead()
        self._link.settle()
        while not self._arrived.empty():  # of those requests alone
            self._arrived.get()

    def _dead(self) -> EngineDeadError:
        return (
            EngineDeadError("the engine is shut down; start a new one") if self._death is None else self._death.copied()
        )
