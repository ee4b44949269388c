"""Engines in processes of their own, with the plugins of the fixture package `probe`, which load no torch."""

from __future__ import annotations

import gc
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tokenyard import LLM, AsyncLLM
from tokenyard.engine.process import EngineProcess
from tokenyard.engine.process_core import RemoteEngine
from tokenyard.engine.process_link import EngineProcessLink
from tokenyard.plugins import forget_plugins

PACKAGE = Path(__file__).resolve().parent.parent / "fixtures" / "packages" / "probe"
LIVENESS = 15.0  # seconds: far more than ten times what anything takes
LETTERS = ["engine.process=own", "executor=letters", "scheduler=probe", "kv_cache.num_blocks=64"]


@contextmanager
def probe_installed() -> Iterator[None]:
    """The package `probe` looks installed, to this process and its children."""
    sys.path.insert(0, str(PACKAGE))
    forget_plugins()
    try:
        yield
    finally:
        sys.path.remove(str(PACKAGE))
        forget_plugins()
        sys.modules.pop("tokenyard_probe", None)


def letters_llm(model: Path, *overrides: str) -> LLM:
    """An LLM on the letters, which takes half a second to start."""
    return LLM(model, max_model_len=128, overrides=[*LETTERS, *overrides])


def letters_async_llm(model: Path, *overrides: str) -> AsyncLLM:
    """The same for asyncio."""
    return AsyncLLM(model, max_model_len=128, overrides=[*LETTERS, *overrides])


def link_of(llm: LLM | AsyncLLM) -> EngineProcessLink:
    """The link to its engine."""
    link = llm._link if isinstance(llm, AsyncLLM) else None
    if isinstance(llm, LLM):
        core = llm.engine.core
        assert isinstance(core, RemoteEngine)
        link = core._link
    assert isinstance(link, EngineProcessLink)
    return link


def process_of(llm: LLM | AsyncLLM) -> EngineProcess:
    """Its engine's process."""
    return link_of(llm).process


def wait_for(condition: Callable[[], object], what: str) -> None:
    """Until it holds."""
    deadline = time.monotonic() + LIVENESS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


def children_of(pid: int) -> list[int]:
    """The processes that a process has started, and those that they have."""
    found: list[int] = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parent = int((folder / "stat").read_text().rsplit(")", 1)[1].split()[1])
            except OSError:
                continue
            if parent == pid and is_running(int(folder.name)):
                found += [int(folder.name), *children_of(int(folder.name))]
    return found


@contextmanager
def short_folder() -> Iterator[Path]:
    """For TMPDIR: an empty folder with a short path, which it has to be again afterwards."""
    with tempfile.TemporaryDirectory(prefix="a", dir="/tmp") as path:
        yield Path(path)
        assert list(Path(path).iterdir()) == []


@contextmanager
def nothing_left() -> Iterator[None]:
    """Whatever happens inside leaves no process, thread or open file of this process behind."""
    gc.collect()
    before = _held()
    yield
    gc.collect()
    deadline = time.monotonic() + LIVENESS
    while not all(now <= then for now, then in zip(_held(), before, strict=True)):
        assert time.monotonic() < deadline, f"processes, threads, files: {before} -> {_held()}"
        time.sleep(0.01)


def _held() -> Sequence[int]:
    return len(children_of(os.getpid())), threading.active_count(), len(os.listdir("/proc/self/fd"))
