"""Supervisor: the engine of a server is started, watched, and where that is wanted started again."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future
from threading import Thread
from typing import TYPE_CHECKING, TypeAlias

from tokenyard.server.service import EngineState

if TYPE_CHECKING:
    from tokenyard.async_llm import AsyncLLM
    from tokenyard.errors import EngineDeadError
    from tokenyard.server.service import Service

logger = logging.getLogger(__name__)

Progress: TypeAlias = "Callable[[str], None]"
Start: TypeAlias = "Callable[[Progress], AsyncLLM]"

MAX_RESTARTS, RESTART_WINDOW = 3, 600.0  # in so many seconds
_RESTART_PAUSE = 0.5  # seconds before the next try, where one has failed
_LAST_WORDS = 1.0  # seconds for which a server whose engine is dead still tells so
_GRACE = 5.0  # seconds for answers that are still going out


class EngineStart:
    """An engine that is being started in a thread, which nobody has to wait for."""

    def __init__(self, start: Start, name: str) -> None:
        self.phase = "starting the engine's process"
        self.percent = 0
        self.began = time.monotonic()
        self.engine: Future[AsyncLLM] = Future()
        Thread(target=self._run, args=(start,), name=name, daemon=True).start()

    def _run(self, start: Start) -> None:
        try:
            engine = start(self._note)
        except BaseException as error:
            self.engine.set_exception(error)
        else:
            self.engine.set_result(engine)

    def abandon(self) -> None:
        """Nobody waits for the engine any more: once it is there, it is stopped."""
        self.engine.add_done_callback(_shut_down)

    def _note(self, phase: str) -> None:
        logger.info("%s", phase)
        self.phase = phase
        self.percent += (100 - self.percent) // 3  # how many phases come depends on model and device


def _shut_down(engine: Future[AsyncLLM]) -> None:
    if engine.exception() is None:
        engine.result().shutdown()


class Supervisor:
    """Keeps a service's `llm`, `state` and `phase` true. In one event loop."""

    def __init__(
        self,
        service: Service,
        start: Start,
        thread_name: str,
        *,
        cancel: Callable[[], None] = lambda: None,
        on_ready: Callable[[AsyncLLM, float], None] = lambda engine, seconds: None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`cancel` ends a call of `start` that runs. `on_ready` is told each engine and how long its start took."""
        self._service = service
        self._cancel = cancel
        self._on_ready = on_ready
        self._start = start
        self._thread_name = thread_name
        self._now = now
        self._restarts: collections.deque[float] = collections.deque(maxlen=MAX_RESTARTS)
        self._current: EngineStart | None = None

    def begin(self) -> None:
        """Start the engine at once, before `run` has its turn."""
        self._service.state = EngineState.STARTING
        self._current = EngineStart(self._start, self._thread_name)

    async def run(self) -> None:
        """Until the engine is gone for good: raises why, also when it is cancelled while it tells so.

        Cancelled before, it leaves the engine to `close`.
        """
        while True:
            engine = await self._started()
            self._current = None
            died: asyncio.Future[EngineDeadError] = asyncio.get_running_loop().create_future()
            engine.on_death(_from_any_thread(died))
            self._service.set_engine(engine, EngineState.READY)
            error = await died
            may_restart = self._may_restart()
            logger.error("%s; %s", error.cause, "it is started again" if may_restart else "the server ends with code 3")
            self._service.set_engine(None, EngineState.STARTING if may_restart else EngineState.DEAD)
            if not may_restart:
                try:
                    await asyncio.to_thread(engine.shutdown)
                    await self._take_leave()
                finally:  # also when a signal cuts that short
                    raise error
            await asyncio.to_thread(engine.shutdown)

    async def close(self) -> None:
        """Stop the engine, if there is one, also one that is still being started; that one is not waited for."""
        engine = self._service.llm
        self._service.set_engine(None, EngineState.DEAD)
        if self._current is not None:
            self._current.abandon()
            self._cancel()
        if engine is not None:
            await asyncio.to_thread(engine.shutdown)

    async def _started(self) -> AsyncLLM:
        """The engine, from the start that has begun or a new one; raises what ended the last try."""
        while True:
            self._current = self._current or EngineStart(self._start, self._thread_name)
            try:
                return await self._follow(self._current)
            except Exception as error:
                self._current = None
                # The first start tells its user what is wrong; one after a death may just have come too early.
                if not self._restarts or not self._may_restart():
                    raise
                logger.error("the engine did not start: %s", error)
                await asyncio.sleep(_RESTART_PAUSE)

    async def _follow(self, start: EngineStart) -> AsyncLLM:
        while not start.engine.done():
            self._service.phase, self._service.percent = start.phase, start.percent
            await asyncio.sleep(0.02)
        engine = start.engine.result()
        self._on_ready(engine, time.monotonic() - start.began)
        return engine

    def _may_restart(self) -> bool:
        if not self._service.config.server.restart_engine:
            return False
        restarts, now = self._restarts, self._now()
        if len(restarts) == MAX_RESTARTS and now - restarts[0] < RESTART_WINDOW:
            logger.error("the engine died %d times in %g s: it stays so", MAX_RESTARTS + 1, RESTART_WINDOW)
            return False
        restarts.append(now)
        return True

    async def _take_leave(self) -> None:
        """Streams are told that the engine is dead, and probes that ask just now."""
        end = self._now() + _GRACE
        await asyncio.sleep(_LAST_WORDS)
        while self._service.num_open and self._now() < end:
            await asyncio.sleep(0.02)


def _from_any_thread(future: asyncio.Future[EngineDeadError]) -> Callable[[EngineDeadError], None]:
    loop = future.get_loop()

    def settle(error: EngineDeadError) -> None:
        if not future.done():
            future.set_result(error)

    def call(error: EngineDeadError) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, or is being closed
            loop.call_soon_threadsafe(settle, error)

    return call
