"""Servers for tests: one in a thread of this process, one as the command runs it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import openai
import psutil
import uvloop
from tokenyard.async_llm import AsyncLLM
from tokenyard.catalogue import Catalogue
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.overrides import quote_override
from tokenyard.server.app import create_app
from tokenyard.server.http import HttpServer, make_http_server
from tokenyard.server.listen import open_listener
from tokenyard.server.service import EngineState, Service

DEADLINE = 60.0  # seconds: liveness only
SMALL = (
    "model.dtype=float32",
    "kv_cache.num_blocks=256",
    "scheduler.max_num_seqs=16",
    "engine.process=in",
    "server.port=0",
)


@dataclass(frozen=True, kw_only=True)
class ThreadServer:
    """A server in a thread of this process, with its engine in another, and a client of it."""

    url: str  # without a slash at its end
    service: Service
    client: openai.OpenAI
    api_keys: Sequence[str]

    @property
    def llm(self) -> AsyncLLM:
        return self.service.engine

    def num_open_streams(self) -> int:
        """Requests of the front end that somebody waits for."""
        return len(self.llm._client._streams)

    def num_used_blocks(self) -> int:
        """K/V blocks that requests hold between two steps."""
        stats = self.llm._link.stats()
        return stats.num_total_blocks - stats.num_free_blocks

    def wait_until_idle(self) -> None:
        """Until no request is left anywhere; AssertionError where that does not come about."""
        wait_for(lambda: self.num_open_streams() == 0, "streams are left")
        wait_for(lambda: self.service.num_open == 0, "HTTP requests are left")
        wait_for(lambda: self.num_used_blocks() == 0, "K/V blocks are left")

    def get(self, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
        """Status and body, with the first API key."""
        keys = {"Authorization": f"Bearer {self.api_keys[0]}"} if self.api_keys else {}
        return http_get(self.url + path, {**keys, **(headers or {})})


@dataclass(frozen=True, kw_only=True)
class ProcessServer:
    """`tokenyard serve` as a process of its own."""

    url: str
    process: subprocess.Popen[bytes]
    log_file: Path  # stdout and stderr
    folder: Path  # its TMPDIR
    mark: str  # stands in the environment of all its processes

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    def family(self) -> list[psutil.Process]:
        """All processes that live and descend from it, whoever their parents are by now."""
        return [process for process in psutil.process_iter() if self.mark in _environment(process)]

    def client(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=self.url + "/v1", api_key=api_key, max_retries=0)

    def get(self, path: str) -> tuple[int, str]:
        return http_get(self.url + path)

    def wait_ready(self) -> None:
        """Until /readyz answers 200; AssertionError with the log where the process ends instead."""

        def is_ready() -> bool:
            assert self.process.poll() is None, f"the server ended with code {self.process.returncode}:\n{self.log}"
            with contextlib.suppress(OSError):
                return self.get("/readyz")[0] == 200
            return False

        wait_for(is_ready, "the server does not get ready", 2 * DEADLINE)


def _environment(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error, OSError):
        if process.status() != psutil.STATUS_ZOMBIE:
            return Path(f"/proc/{process.pid}/environ").read_text(errors="replace")
    return ""


def http_get(url: str, headers: Mapping[str, str] | None = None) -> tuple[int, str]:
    """Status and body, of errors too; OSError where nobody answers."""
    request = urllib.request.Request(url, headers=dict(headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def wait_for(condition: Callable[[], bool], what: str, deadline: float = DEADLINE) -> None:
    """Poll until the condition holds; AssertionError with `what` after the deadline."""
    end = time.monotonic() + deadline
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.01)


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


@contextlib.contextmanager
def running_server(
    overrides: Sequence[str] = (),
    *,
    model: Path | str | None = None,
    api_keys: Sequence[str] = (),
    catalogue: Catalogue | None = None,
) -> Iterator[ThreadServer]:
    """Serve in a thread, on a free loopback port (or as `server.uds` says); `model` None = the default model.

    `catalogue` has parts of the test's own. At the end no request, block or thread may be left.
    """
    names = [] if model is None else [quote_override("model.name", str(model))]
    config, found = load_engine_config([*names, *SMALL, *overrides], catalogue=catalogue)
    threads = set(threading.enumerate())
    service = Service(config=config)
    service.set_engine(AsyncLLM.from_parts(config, found), EngineState.READY)
    server = make_http_server(config.server, create_app(service, api_keys))
    key = api_keys[0] if api_keys else "none"
    with open_listener(config.server) as listener:
        url = listener.address
        thread = threading.Thread(target=_serve, args=(server, listener.socket), name="test-server")
        thread.start()
        try:
            with openai.OpenAI(base_url=url + "/v1", api_key=key, max_retries=0, timeout=DEADLINE) as client:
                running = ThreadServer(url=url, service=service, client=client, api_keys=tuple(api_keys))
                wait_for(lambda: server.started, "the server does not start")
                yield running
                if service.llm is not None:
                    running.wait_until_idle()
        finally:
            server.should_exit = True
            thread.join(DEADLINE)
            if service.llm is not None:
                service.llm.shutdown()
    assert not thread.is_alive(), "the server does not end"
    wait_for(lambda: not _left(threads), "threads are left")


def _serve(server: HttpServer, listener: socket.socket) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve([listener]))


def _left(before: set[threading.Thread]) -> list[str]:
    """Threads of ours that were not there before; pools of libraries stay for the next one."""
    return [
        thread.name
        for thread in threading.enumerate()
        if thread not in before and thread.name.startswith(("tokenyard", "test-server", "asyncio"))
    ]


@contextlib.contextmanager
def server_process(
    arguments: Sequence[str],
    *,
    wait: bool = True,
    environment: Mapping[str, str] | None = None,
) -> Iterator[ProcessServer]:
    """Run `tokenyard serve ARGUMENTS` on a free port; with `wait`, until /readyz is 200. It is killed at the end."""
    port, mark = free_port(), f"TOKENYARD_TEST={uuid.uuid4().hex}"
    command = [sys.executable, "-c", "from tokenyard.cli import main; main()", "serve", f"--port={port}", *arguments]
    with tempfile.TemporaryDirectory(prefix="tokenyard-test-") as folder:
        log_file, temporary = Path(folder) / "log", Path(folder) / "t"
        temporary.mkdir()
        own = {"TMPDIR": str(temporary), **dict([mark.split("=")]), **(environment or {})}
        with log_file.open("wb") as log:
            process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env={**os.environ, **own})
        try:
            running = ProcessServer(
                url=f"http://127.0.0.1:{port}",
                process=process,
                log_file=log_file,
                folder=Path(own["TMPDIR"]),
                mark=mark,
            )
            if wait:
                running.wait_ready()
            yield running
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait(DEADLINE)
