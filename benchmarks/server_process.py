"""`tokenyard serve` as a process of its own, for scripts that look at one from outside: its start, its end, its use."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import psutil

READY_SECONDS = 300.0
END_SECONDS = 60.0


class Use(NamedTuple):
    """What one process has of the machine."""

    rss: float  # MiB
    cpu: float  # seconds so far, user and system, all threads
    num_files: int  # open descriptors
    num_threads: int


class ServerProcess:
    """A running server. `log_file` has what all its processes say."""

    def __init__(self, url: str, process: subprocess.Popen[bytes], log_file: Path) -> None:
        self.url = url
        self.process = process
        self.log_file = log_file

    def get(self, path: str) -> tuple[int, str]:
        """Status and body; OSError where nobody answers."""
        try:
            with urllib.request.urlopen(self.url + path, timeout=10) as answer:  # noqa: S310 - a URL of this script
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def wait_ready(self) -> None:
        """Until /readyz answers 200; SystemExit with the log where it does not come to that."""
        end = time.monotonic() + READY_SECONDS
        while not self.is_ready():
            if self.process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the server did not start:\n{self.log()[-2000:]}")
            time.sleep(0.05)

    def is_ready(self) -> bool:
        try:
            return self.get("/readyz")[0] == 200
        except OSError:
            return False

    def log(self) -> str:
        return self.log_file.read_text(errors="replace")

    def members(self) -> dict[str, psutil.Process]:
        """Its processes that live, by name: `api`, and each child under the name that it was given."""
        api = psutil.Process(self.process.pid)
        return {"api": api, **{_name(child): child for child in api.children(recursive=True)}}

    def use(self) -> dict[str, Use]:
        """Of each process, by name."""
        return {name: use_of(process) for name, process in self.members().items()}

    def stop(self) -> tuple[int, float, list[str]]:
        """SIGTERM: the exit code, the seconds that it took, and the names of processes that it has left behind."""
        members = self.members()
        began = time.monotonic()
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(END_SECONDS)
        seconds = time.monotonic() - began
        gone, _ = psutil.wait_procs(members.values(), timeout=5)
        return code, seconds, [name for name, process in members.items() if process not in gone]


def use_of(process: psutil.Process) -> Use:
    with process.oneshot():
        times = process.cpu_times()
        rss = process.memory_info().rss / 2**20
        return Use(rss, times.user + times.system, process.num_fds(), process.num_threads())


def _name(process: psutil.Process) -> str:
    """What our children are told on their command line; of others the last module or program there."""
    words = process.cmdline()
    try:
        return str(json.loads(words[-1])["name"])
    except (IndexError, KeyError, TypeError, ValueError):
        text = " ".join(words)
    return next((name for name in ("template", "resource_tracker") if name in text), process.name())


def command_line(arguments: Sequence[str], flags: Sequence[str] = ()) -> list[str]:
    """What the command `tokenyard` runs, under this interpreter with these flags of its own."""
    return [sys.executable, *flags, "-c", "from tokenyard.cli import main; main()", *arguments]


@contextmanager
def launched(
    arguments: Sequence[str], *, environment: Mapping[str, str] | None = None, flags: Sequence[str] = ()
) -> Iterator[ServerProcess]:
    """`tokenyard serve ARGUMENTS` on a free port, just begun; at the end it is killed if it is still there."""
    port = free_port()
    command = command_line(["serve", f"--port={port}", *arguments], flags)
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as folder:
        log_file = Path(folder) / "log"
        with log_file.open("wb") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **(environment or {})}
            )
        try:
            yield ServerProcess(f"http://127.0.0.1:{port}", process, log_file)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


@contextmanager
def serving(arguments: Sequence[str], *, environment: Mapping[str, str] | None = None) -> Iterator[ServerProcess]:
    """The same, from /readyz 200 on; a SIGTERM ends it."""
    with launched(arguments, environment=environment) as server:
        server.wait_ready()
        yield server
        if server.process.poll() is None:
            server.stop()


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port
