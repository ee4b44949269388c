"""Watchdog: notices an engine that stands still, says what it is doing, and in the end kills it."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tokenyard.ipc.progress import EnginePhase
from tokenyard.ipc.stacks import save_stacks

if TYPE_CHECKING:
    from tokenyard.ipc.progress import ProgressReading

logger = logging.getLogger(__name__)

FIRST_STEP_GRACE = 300.0  # seconds that the first step may take at least: kernels may compile in it
_MOST_LOGGED = 20_000  # characters of stacks in the log; the dump has all


class Rung(IntEnum):
    """Of the ladder, at so many times the timeout."""

    MOVING = 0
    WARNED = 1
    DUMPED = 2
    KILLED = 3


class WatchedEngine(Protocol):
    """What is needed of an AsyncLLM."""

    def progress(self) -> ProgressReading: ...
    def dump_stacks(self) -> str: ...
    def kill(self, cause: str) -> None: ...


class Stall(NamedTuple):
    """An engine that has work and does not move."""

    seconds: float
    what: str  # it is doing, for people


def stall_of(reading: ProgressReading, timeout: float, *, is_held_back: bool) -> Stall | None:
    """Whether an engine stands still: it has requests, and for `timeout` seconds no step has ended.

    A long pause between two steps is none where the policy holds all requests back (`is_held_back`). An engine with
    nothing to do never stands still.
    """
    if reading.phase is EnginePhase.STEPPING:
        patience = max(timeout, FIRST_STEP_GRACE) if reading.num_steps == 0 else timeout
        what = f"step {reading.num_steps}"
    elif reading.phase is EnginePhase.IDLE and not is_held_back:
        patience, what = timeout, f"nothing, after step {reading.num_steps - 1}"
    else:
        return None
    if not reading.is_busy or reading.seconds < patience:
        return None
    return Stall(reading.seconds - patience + timeout, what)


class Watchdog:
    """Asks the engine's progress counter, never the engine. In one event loop; `folder` is for dumps."""

    def __init__(self, timeout: float, *, folder: Path | None = None, now: Callable[[], float] = time.time) -> None:
        self._timeout = timeout
        self._folder = Path(tempfile.gettempdir()) if folder is None else folder
        self._now = now
        self._rung = Rung.MOVING
        self._dump: Path | None = None

    @property
    def poll_seconds(self) -> float:
        """How often to look."""
        return min(1.0, max(0.01, self._timeout / 20))

    async def look(self, engine: WatchedEngine, *, is_held_back: bool) -> bool:
        """Whether it stands still now; a rung of the ladder is climbed where it is time to."""
        stall = stall_of(engine.progress(), self._timeout, is_held_back=is_held_back)
        if stall is None:
            if self._rung is not Rung.MOVING:
                logger.warning("the engine moves again")
            self._rung = Rung.MOVING
            return False
        due = Rung(min(int(stall.seconds / self._timeout), Rung.KILLED))
        if due > self._rung:
            self._rung = Rung(self._rung + 1)
            await self._climb(engine, stall)
        return True

    async def _climb(self, engine: WatchedEngine, stall: Stall) -> None:
        told = f"the engine has work and has not moved for {stall.seconds:.1f} s; it runs {stall.what}"
        if self._rung is Rung.KILLED:
            logger.error("%s; it is killed", told)
            engine.kill(f"{told}, server.stall_timeout={self._timeout:g} s; stacks are in {self._dump}")
            return
        stacks = await asyncio.to_thread(engine.dump_stacks)
        if self._rung is Rung.WARNED:
            logger.warning("%s\n%s", told, stacks[:_MOST_LOGGED])
            return
        self._dump = self._folder / f"tokenyard-stall-{os.getpid()}-{self._now():.0f}.txt"
        await asyncio.to_thread(save_stacks, f"{told}\n\n{stacks}", self._dump)
        logger.error("%s; stacks of all processes are in %s", told, self._dump)
