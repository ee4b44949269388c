"""How long each phase of a start took, from the moment the process was created."""

from __future__ import annotations

import os
import time
from pathlib import Path


class Phases:
    """`end` closes a phase; times are wall-clock seconds."""

    def __init__(self) -> None:
        self._last = time.perf_counter()
        self.seconds: dict[str, float] = {"interpreter": interpreter_seconds()}

    def end(self, name: str) -> None:
        """What has passed since the last phase belongs to `name`."""
        now = time.perf_counter()
        self.seconds[name] = self.seconds.get(name, 0.0) + now - self._last
        self._last = now

    @property
    def total(self) -> float:
        return sum(self.seconds.values())

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.seconds.items())


def interpreter_seconds() -> float:
    """What the start of the interpreter took so far.

    A shell may have become this process (`exec`) long after it was created; the processor time then says more.
    """
    age, busy = process_age(), time.process_time()
    return age if age < 3 * busy + 1.0 else busy


def process_age() -> float:
    """Seconds since this process was created; 0 where the system does not tell."""
    stat, uptime = Path("/proc/self/stat"), Path("/proc/uptime")
    if not stat.is_file() or not uptime.is_file():
        return 0.0
    # Field 22, counted from behind the program's name, which may contain anything.
    ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return max(0.0, float(uptime.read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK"))
