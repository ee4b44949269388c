"""`tokenyard bench startup`: seconds from the start of a process to its first token, in fresh interpreters."""

from __future__ import annotations

import json
import logging
import os
import statistics
import subprocess
import sys
import time
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.bench.report import machine
from tokenyard.errors import TokenyardError, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

logger = logging.getLogger(__name__)

PROMPT = "What is the capital of France?"


class Start(NamedTuple):
    """One process: all of its wall time seen from outside, and its own phases up to the first token."""

    wall: float  # seconds, the interpreter's end included
    phases: dict[str, float]  # seconds, in order; "rest" comes after the first token
    model: str

    @property
    def first_token(self) -> float:
        """Seconds from the start of the process to the first token."""
        return sum(seconds for name, seconds in self.phases.items() if name != "rest")


def timed_start(arguments: Sequence[str] = ()) -> Start:
    """Run `tokenyard generate` for one token; `arguments` are a model and overrides as on the command line."""
    command = [sys.executable, "-c", "from tokenyard.cli import main; main()", "generate", PROMPT]
    flags = ["--max-tokens", "1", "--temperature", "0", "--json"]
    began = time.perf_counter()
    done = subprocess.run([*command, *flags, *arguments], capture_output=True, text=True, check=False)
    wall = time.perf_counter() - began
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no message"])[-1]
        kind = UserError if done.returncode == UserError.exit_code else TokenyardError
        raise kind(f"the started process failed with exit code {done.returncode}: {reason.removeprefix('error: ')}")
    answer = json.loads(done.stdout)
    return Start(wall, answer["phases"], answer["model"])


def run_startup_bench(num_iters: int, model: Path, arguments: Sequence[str]) -> dict[str, object]:
    """Medians over pairs of starts: a cold one, for which the model's files are read from the disk, and a warm one.

    `model` is the folder or file that `arguments` name. Where the system does not forget files on request there are
    warm starts only, after one that is not counted.
    """
    around, can_forget = machine(), forget(model)
    cold: list[Start] = []
    warm: list[Start] = []
    if not can_forget:
        timed_start(arguments)
    for number in range(num_iters):
        logger.info("pair %d of %d", number + 1, num_iters)
        if can_forget:
            forget(model)
            cold.append(timed_start(arguments))
        warm.append(timed_start(arguments))
    return {
        "benchmark": "startup",
        "model": warm[0].model,
        "num_iters": num_iters,
        "warm": _medians(warm),
        "cold": _medians(cold) if cold else None,
        **around,
    }


def forget(model: Path) -> bool:
    """Have the system drop its copy in memory of a model's files; False where it offers no such thing."""
    if not hasattr(os, "posix_fadvise"):
        return False
    for path in sorted(model.iterdir()) if model.is_dir() else [model]:
        with suppress(OSError), path.open("rb") as file:  # what cannot be read, the start itself tells
            os.fsync(file.fileno())  # what is not on the disk yet is not dropped
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def _medians(starts: Sequence[Start]) -> dict[str, object]:
    """The phases' sum is the first token's time but for what medians do."""
    names = starts[0].phases
    return {
        "first_token_s": round(statistics.median(start.first_token for start in starts), 3),
        "wall_s": round(statistics.median(start.wall for start in starts), 3),
        "phases_s": {name: round(statistics.median(start.phases[name] for start in starts), 3) for name in names},
    }
