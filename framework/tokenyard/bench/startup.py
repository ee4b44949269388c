"""`tokenyard bench startup`: seconds from the start of a process to its first token, in fresh interpreters."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, NamedTuple

from tokenyard.bench.report import machine
from tokenyard.errors import TokenyardError, UserError

if TYPE_CHECKING:
    from collections.abc import Sequence

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


def run_startup_bench(num_iters: int, arguments: Sequence[str]) -> dict[str, object]:
    """Medians over the starts; the first, which may find the files not yet in memory, is told apart."""
    around = machine()
    starts = [timed_start(arguments) for _ in range(num_iters)]
    names = starts[0].phases
    return {
        "benchmark": "startup",
        "model": starts[0].model,
        "num_iters": num_iters,
        "first_token_s": round(statistics.median(start.first_token for start in starts), 3),
        "wall_s": round(statistics.median(start.wall for start in starts), 3),
        "first_start_s": round(starts[0].first_token, 3),
        "phases_s": {name: round(statistics.median(start.phases[name] for start in starts), 3) for name in names},
        **around,
    }
