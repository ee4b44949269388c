"""What a child process does first: it binds its life to its parent's."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import NoReturn

from tokenyard.ipc.stacks import register_stacks

_PR_SET_PDEATHSIG = 1
_FOLDER_POLL = 0.05  # seconds between two looks at whether the parent has removed its folder
_MOST_REMOVALS = 1000
_settled = threading.Event()


@dataclass(frozen=True, slots=True)
class ChildArguments:
    """What the parent told when it started this process."""

    name: str
    arguments: Sequence[str]


def begin_child(on_end: Callable[[], None]) -> ChildArguments:
    """The first call of a child's `main`, in its main thread.

    From here on the process dies with its parent, and `on_end` is called in a thread of its own when the parent closes
    its stdin or has gone: it has to see to it that the process ends soon. SIGINT and SIGTERM, which a terminal or a
    service manager may send to a whole group, are left to the parent. Output to stdout goes where stderr goes.

    Where the parent gave a folder, this process removes it when the parent has gone before it could; the kernel, which
    ends it with its parent at once, is asked to do so when the folder is no more and this process has called `settle`.
    """
    told = json.loads(sys.argv[1])
    folder: str | None = told["folder"]
    if folder is None:
        _die_with_parent()
        if os.getppid() != told["parent"]:
            end_now()  # it had ended before
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _ignore)  # not SIG_IGN, which programs that this process starts would inherit
    threading.Thread(target=_watch, args=(_take_stdin(), folder, on_end), name="tokenyard-parent", daemon=True).start()
    register_stacks(told["stacks"], told["name"])
    sys.argv[1:] = told["arguments"]
    return ChildArguments(told["name"], tuple(told["arguments"]))


def settle() -> None:
    """The process has what it needs: it leaves nothing behind if it is killed. Until then its end takes a moment."""
    _settled.set()


def end_now(exit_code: int = 1) -> NoReturn:
    """End this process without unwinding anything: for `on_end`, when nobody is left to tell."""
    os._exit(exit_code)


def _die_with_parent() -> None:
    """Linux ends this process with the thread that started it; elsewhere the end of stdin has to do.

    The kernel keeps this for the thread that asks, which must not end before the process does.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _take_stdin() -> int:
    """The pipe from the parent; whoever reads stdin from here on finds nothing."""
    pipe = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return pipe


def _watch(pipe: int, folder: str | None, on_end: Callable[[], None]) -> None:
    if folder is not None:
        while os.path.exists(folder) or not _settled.is_set():
            if select.select([pipe], [], [], _FOLDER_POLL)[0] and not os.read(pipe, 4096):
                _remove(folder)
                on_end()
                return
        _die_with_parent()
    while os.read(pipe, 4096):
        pass
    on_end()


def _remove(folder: str) -> None:
    """Until it is gone: other processes, and this one's other threads, may still put something into it."""
    for _ in range(_MOST_REMOVALS):
        shutil.rmtree(folder, ignore_errors=True)
        if not os.path.exists(folder):
            return


def _ignore(number: int, frame: FrameType | None) -> None:
    pass
