"""Compiling the kernels with the user's own C++ compiler."""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

SOURCES = Path(__file__).with_name("kernels")
COMPILERS = ("c++", "g++", "clang++")
# No -ffast-math and no -Ofast: linked with them, a library makes the whole process flush subnormal numbers to zero.
FLAGS = [
    *("-std=c++17", "-O3", "-shared", "-fPIC", "-fvisibility=hidden", "-fno-exceptions", "-fno-rtti"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast", "-Wno-psabi"),
]
_SECONDS = 120.0


class BuildError(Exception):
    """Why there are no kernels, in one line."""


@dataclass(frozen=True, slots=True)
class Compiler:
    """A C++ compiler that answers: its command and what it says of its version."""

    command: tuple[str, ...]
    version: str


def find_compilers() -> Sequence[tuple[str, ...]]:
    """Commands to try: $CXX alone where it is set, else what of `COMPILERS` is on PATH, each program once."""
    if sys.platform == "win32":
        raise BuildError("it is built on Linux and macOS only")
    if explicit := os.environ.get("CXX"):
        return [_command_of(explicit)]
    found = [path for name in COMPILERS if (path := shutil.which(name))]
    if not found:
        raise BuildError(f"no C++ compiler found (tried {', '.join(COMPILERS)})")
    by_program: dict[str, str] = {}
    for path in found:
        by_program.setdefault(os.path.realpath(path), path)
    return [(path,) for path in by_program.values()]


def _command_of(text: str) -> tuple[str, ...]:
    try:
        command = tuple(shlex.split(text))
    except ValueError as error:
        raise BuildError(f"CXX={text!r} is not a command: {error}") from None
    if not command or shutil.which(command[0]) is None:
        raise BuildError(f"no C++ compiler found (CXX={text} is not on PATH)")
    return command


def ask_version(command: tuple[str, ...]) -> Compiler:
    """Raises BuildError if the compiler does not run."""
    return Compiler(command, _run([*command, "--version"], 20.0))


def flags_for_this_cpu() -> Sequence[str]:
    """`FLAGS` and what makes the compiler use all instructions of this CPU."""
    machine = platform.machine().lower()
    if machine in ("x86_64", "amd64", "i686"):
        return [*FLAGS, "-march=native"]
    return [*FLAGS, "-mcpu=native"] if machine in ("aarch64", "arm64") else FLAGS


def compile_kernels(compiler: Compiler, target: Path) -> None:
    """Raises BuildError with the compiler's first error."""
    _run([*compiler.command, *flags_for_this_cpu(), "-o", str(target), str(SOURCES / "attention.cpp")], _SECONDS)
    if not target.is_file():
        raise BuildError(f"{_name(compiler.command)} said nothing and wrote nothing")


def _run(command: Sequence[str], seconds: float) -> str:
    """What the command printed. It runs without a shell, in a process group that ends with it."""
    name = _name(command)
    with tempfile.TemporaryFile() as output:  # not a pipe: a child that lives on would keep that open
        try:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "LC_ALL": "C"},
                start_new_session=True,
            )
        except OSError as error:
            raise BuildError(f"{name} does not run: {error.strerror}") from None
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise BuildError(f"{name} did not finish within {seconds:g} s") from None
        finally:
            _end(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status:
        raise BuildError(f"{name} failed: {_first_error(text) or f'exit status {status}'}")
    return text


def _name(command: Sequence[str]) -> str:
    return Path(command[0]).name


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "")[:300]
