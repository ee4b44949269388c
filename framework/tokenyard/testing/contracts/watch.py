"""Watches what a policy calls: a policy may read no clock but the view's, and draw no numbers but the view's."""

from __future__ import annotations

import datetime
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from tokenyard.scheduler.policy_calls import overridden

if TYPE_CHECKING:
    from tokenyard.interfaces.policy import SchedulingPolicy

_NAMES = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
_CLOCKS = frozenset(
    getattr(time, name)
    for name in ("sleep", *_NAMES, *(f"{name}_ns" for name in _NAMES))
    if hasattr(time, name)  # not every system has each of them
)
_DATES = (datetime.datetime, datetime.date)
_SHARED_RANDOM = random.getrandbits.__self__  # type: ignore[attr-defined]  # the generator behind the module's functions


def watch(policy: SchedulingPolicy, clocks: list[str], draws: list[str]) -> None:
    """From now on each decision of `policy` notes the clocks it reads and the shared random numbers it draws."""
    base = type(policy)

    def watched(name: str) -> Callable[..., object]:
        def call(self: SchedulingPolicy, *arguments: object) -> object:
            with _noting(clocks, draws):
                return getattr(super(own, self), name)(*arguments)

        return call

    methods = {name: watched(name) for name in overridden(policy)}
    own = type(base.__name__, (base,), {**methods, "__slots__": (), "__module__": base.__module__})
    policy.__class__ = own


@contextmanager
def _noting(clocks: list[str], draws: list[str]) -> Iterator[None]:
    def note(frame: FrameType, event: str, called: object) -> None:
        # A log record has a time stamp; nobody decides by it.
        if event != "c_call" or str(frame.f_globals.get("__name__")).partition(".")[0] == "logging":
            return
        where = f"{getattr(called, '__name__', called)} in {frame.f_code.co_qualname}"
        if called in _CLOCKS or getattr(called, "__self__", None) in _DATES:
            clocks.append(where)
        elif called is os.urandom or getattr(called, "__self__", None) is _SHARED_RANDOM:
            draws.append(where)

    before, collects = sys.getprofile(), gc.isenabled()
    gc.disable()  # a collection may run callbacks of others, which are not the policy's doing
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
