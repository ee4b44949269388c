"""How far an engine is, in memory that its parent reads without asking: also when the engine answers nobody."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from enum import IntEnum
from typing import NamedTuple

# Read in this order, and written in the opposite one: whoever sees that there is work, or that a step has ended, sees
# no time from before it.
_NUM_UNFINISHED, _NUM_STEPS, _PHASE, _SINCE = range(4)
_SIZE = 4 * 8  # bytes: each field is one aligned 64-bit store


class EnginePhase(IntEnum):
    """What an engine is doing."""

    STARTING = 0
    IDLE = 1  # it waits: nothing is there to do, or nothing of it could be scheduled
    STEPPING = 2
    ENDED = 3
    HELD = 4  # it waits: the policy, or a pause, holds back all that there is


class ProgressReading(NamedTuple):
    """How far an engine is."""

    num_steps: int  # that have ended, since the start
    phase: EnginePhase
    seconds: float  # since it last moved: in this phase, or with work and without the end of a step
    num_unfinished: int  # requests

    @property
    def is_busy(self) -> bool:
        """Whether there is work, so that the number of steps should grow."""
        return self.num_unfinished > 0


class Progress:
    """One writer, any number of readers. `descriptor` goes to the writer's process."""

    def __init__(self, descriptor: int | None = None) -> None:
        """None = new memory; else that of another process's Progress."""
        self._file = None
        if descriptor is None:
            self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115  # open until `close`
            self._file.truncate(_SIZE)
            descriptor = self._file.fileno()
        self.descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _SIZE)
        self._fields = memoryview(self._memory).cast("q")
        self._last: ProgressReading | None = None  # once it is closed
        self._is_stuck = False  # the writer's: there is work, and the last step that was begun did not run

    def read(self) -> ProgressReading:
        """Now; after `close`, as it was then."""
        if self._last is not None:
            return self._last
        num_unfinished, num_steps, phase, since = self._fields.tolist()
        return ProgressReading(num_steps, EnginePhase(phase), _age(since), num_unfinished)

    # The writer, in its step loop

    def begin_step(self, num_unfinished: int) -> None:
        """A step begins, with so many requests."""
        fields = self._fields
        if not self._is_stuck:
            fields[_SINCE] = time.monotonic_ns()
        fields[_PHASE] = EnginePhase.STEPPING
        fields[_NUM_UNFINISHED] = num_unfinished

    def end_step(self, num_unfinished: int) -> None:
        """It has ended, with so many requests left."""
        fields = self._fields
        self._is_stuck = False
        fields[_SINCE] = time.monotonic_ns()
        fields[_NUM_STEPS] += 1
        fields[_NUM_UNFINISHED] = num_unfinished

    def set_unfinished(self, num_unfinished: int) -> None:
        """Requests came or went."""
        self._fields[_NUM_UNFINISHED] = num_unfinished

    def enter(self, phase: EnginePhase) -> None:
        """Another phase than STEPPING."""
        # Until a step ends, an engine that looks again in vain has not moved.
        self._is_stuck = phase is EnginePhase.IDLE and self._fields[_NUM_UNFINISHED] > 0
        if not self._is_stuck:
            self._fields[_SINCE] = time.monotonic_ns()
        self._fields[_PHASE] = phase

    def close(self) -> None:
        """Give the memory back; nothing is written any more."""
        if self._last is None:
            self._last = self.read()
            self._fields = memoryview(bytearray(self._fields)).cast("q")  # for who is reading at this moment
            with contextlib.suppress(BufferError):  # somebody is: then the memory goes when that has ended
                self._memory.close()
            if self._file is not None:
                self._file.close()


def _age(since: int) -> float:
    """Both processes read one clock, that of the machine."""
    return max(0.0, (time.monotonic_ns() - since) / 1e9) if since else 0.0


def inherited_progress(descriptor: str) -> Progress:
    """That of the parent, which told its number; the descriptor is closed here."""
    number = int(descriptor)
    progress = Progress(number)
    os.close(number)
    return progress
