"""Watchdog: notices an engine that stands still, says what it is doing, and in the end kills it."""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tokenyard.ipc.progress import EnginePhase

if TYPE_CHECKING:
    from tokenyard.ipc.progress import ProgressReading

logger = logging.getLogger(__name__)

FIRST_STEP_GRACE = 300.0  # seconds that the first step may take at least, where kernels may be compiled in it
_DUMP_GRACE = 30.0  # seconds for which the next rung waits until the stacks are written
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
    def dump_stacks(self, path: Path | None = None) -> str: ...
    def kill(self, cause: str) -> None: ...


class Stall(NamedTuple):
    """An engine that has work and does not move."""

    seconds: float
    what: str  # it is doing, for people


def stall_of(reading: ProgressReading, timeout: float, *, may_compile: bool = False) -> Stall | None:
    """Whether an engine stands still: it has requests, and for `timeout` seconds no step has ended.

    One with nothing to do never does, nor one whose requests are all held back by the policy or a pause. Where the
    engine `may_compile`, its very first step has FIRST_STEP_GRACE.
    """
    patience = timeout
    if reading.phase is EnginePhase.STEPPING:
        what = f"step {reading.num_steps}"
        if may_compile and reading.num_steps == 0:
            patience = max(timeout, FIRST_STEP_GRACE)
    elif reading.phase is EnginePhase.IDLE:
        what = f"nothing, after {reading.num_steps} steps"
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
        self._writer: threading.Thread | None = None  # of the last rung's stacks
        self._write_until = 0.0  # in seconds of the stall

    @property
    def poll_seconds(self) -> float:
        """How often to look."""
        return min(1.0, max(0.01, self._timeout / 20))

    def look(self, engine: WatchedEngine, *, may_compile: bool = False) -> bool:
        """Whether it stands still now; a rung of the ladder is climbed where it is time to. Waits for nothing."""
        stall = stall_of(engine.progress(), self._timeout, may_compile=may_compile)
        if stall is None:
            if self._rung is not Rung.MOVING:
                logger.warning("the engine moves again")
            self._rung = Rung.MOVING
            return False
        due = Rung(min(int(stall.seconds / self._timeout), Rung.KILLED))
        if due > self._rung and not self._is_writing(stall):
            self._rung = Rung(self._rung + 1)
            self._climb(engine, stall)
        return True

    def _is_writing(self, stall: Stall) -> bool:
        return self._writer is not None and self._writer.is_alive() and stall.seconds < self._write_until

    def _climb(self, engine: WatchedEngine, stall: Stall) -> None:
        told = f"the engine has work and has not moved for {stall.seconds:.1f} s; it runs {stall.what}"
        if self._rung is Rung.KILLED:
            logger.error("%s; it is killed", told)
            engine.kill(f"{told}, server.stall_timeout={self._timeout:g} s; stacks are in {self._dump}")
            return
        self._dump = self._path() if self._rung is Rung.DUMPED else None
        # Of its own: the event loop's threads may be what is stuck, and the loop goes on answering /readyz meanwhile.
        self._writer = threading.Thread(
            target=_write_stacks, args=(engine, told, self._dump), name="tokenyard-stacks", daemon=True
        )
        self._write_until = stall.seconds + _DUMP_GRACE
        self._writer.start()

    def _path(self) -> Path:
        return self._folder / f"tokenyard-stall-{os.getpid()}-{self._now():.0f}.txt"


def _write_stacks(engine: WatchedEngine, told: str, path: Path | None) -> None:
    """To the log, or to a file that the log names."""
    try:
        stacks = engine.dump_stacks(path)
    except Exception:
        logger.exception("%s; its stacks cannot be had", told)
        return
    if path is None:
        logger.warning("%s\n%s", told, stacks[:_MOST_LOGGED])
    else:
        logger.error("%s; stacks of all processes are in %s", told, path)
