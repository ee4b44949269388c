"""Watches what a policy does beside deciding: the clocks it reads, the numbers it draws, and what it changes."""

from __future__ import annotations

import asyncio
import datetime
import gc
import os
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING, cast

import numpy as np

from tokenyard.interfaces.latency import LatencyModel
from tokenyard.interfaces.predictor import OutputLengthPredictor
from tokenyard.testing.policy_calls import surround

if TYPE_CHECKING:
    from tokenyard.interfaces.policy import SchedulerView, SchedulingPolicy

_NAMES = ("time", "monotonic", "perf_counter", "process_time", "thread_time", "clock_gettime")
_DATES_OF_NOW = ("ctime", "gmtime", "localtime", "strftime")
_CLOCKS = frozenset(
    getattr(time, name)
    for name in ("sleep", *_DATES_OF_NOW, *_NAMES, *(f"{name}_ns" for name in _NAMES))
    if hasattr(time, name)  # not every system has each of them
) | {os.times}
_DATES = (datetime.datetime, datetime.date)
_SHARED_RANDOM = random.getrandbits.__self__  # type: ignore[attr-defined]  # the generator behind the module's functions
_OTHERS = (OutputLengthPredictor, LatencyModel)
"""Plugins that a policy may ask: what they draw is not the policy's doing."""

_FACTS = (
    *("request_id", "arrival_time", "arrival_tokens", "num_prompt_tokens", "num_computed_tokens", "num_output_tokens"),
    *("max_output_tokens", "num_in_flight_tokens", "num_preemptions", "priority", "client_id", "session_id"),
    *("parent_id", "deadline", "service_level", "attained_service", "is_paused"),
)
"""What a RequestView says, its metadata left out."""


def watch(policy: SchedulingPolicy, clocks: list[str], draws: list[str]) -> None:
    """From now on each decision of `policy` notes the clocks it reads, and the numbers it draws but the view's."""

    def around(name: str, method: Callable[..., object], arguments: Sequence[object]) -> object:
        rng = arguments[-1].rng  # type: ignore[attr-defined]  # the view comes last
        with noting(clocks, draws, allowed=rng):
            return method(*arguments)

    surround(policy, around)


def watch_changes(policy: SchedulingPolicy, changes: list[str]) -> None:
    """From now on each decision of `policy` notes what it changes of what it was given."""

    def around(name: str, method: Callable[..., object], arguments: Sequence[object]) -> object:
        before = _facts_of(arguments)
        answer = method(*arguments)
        if (after := _facts_of(arguments)) != before:
            changed = sorted(key for key in before.keys() | after.keys() if before.get(key) != after.get(key))
            changes.append(
                f"{name} changed {changed[0]}: it was {before.get(changed[0])} and is {after.get(changed[0])}"
            )
        return answer

    surround(policy, around)


def _facts_of(arguments: Sequence[object]) -> Mapping[str, object]:
    """All that a decision may see, by name."""
    given, view = arguments[:-1], cast("SchedulerView", arguments[-1])
    facts = _facts_of_view(view)
    for number, argument in enumerate(given):
        requests = argument if isinstance(argument, Sequence) and not isinstance(argument, str) else [argument]
        facts[f"argument {number + 1}"] = [_name_of(one) for one in requests]
        facts |= {f"'{_name_of(one)}'": _facts_of_request(one) for one in requests if hasattr(one, "request_id")}
    return facts


def _facts_of_view(view: SchedulerView) -> dict[str, object]:
    running, waiting = view.running, view.waiting(view.num_waiting)
    return {
        "view.running": [request.request_id for request in running],
        "view.waiting": [request.request_id for request in waiting],
        "view.num_free_blocks": view.num_free_blocks,
        "view.now": view.now,
        **{f"'{request.request_id}'": _facts_of_request(request) for request in (*running, *waiting)},
    }


def _facts_of_request(request: object) -> Mapping[str, object]:
    return {**{name: getattr(request, name) for name in _FACTS}, "metadata": repr(getattr(request, "metadata", None))}


def _name_of(argument: object) -> str:
    """A request, what happened to one, or anything else."""
    request = getattr(argument, "request", argument)
    return str(getattr(request, "request_id", request))


@contextmanager
def noting(
    clocks: list[str], draws: list[str], allowed: object = None, *, own_generators: bool = False
) -> Iterator[None]:
    """Meanwhile, the clocks that are read and the random numbers that are drawn in this thread are noted.

    Numbers of the generator `allowed` are not, nor those of predictors and latency models; with `own_generators` those
    of no generator that somebody made, which leaves the shared ones.
    """

    def note(frame: FrameType, event: str, called: object) -> None:
        # A log record has a time stamp; nobody decides by it.
        if event != "c_call" or str(frame.f_globals.get("__name__")).partition(".")[0] == "logging":
            return
        owner = getattr(called, "__self__", None)
        where = f"{getattr(called, '__name__', called)} in {frame.f_code.co_qualname}"
        if _is_clock(called, owner):
            clocks.append(where)
        elif _is_shared_draw(called, owner) or (judges_others and owner is not allowed and _is_draw(owner, frame)):
            draws.append(where)

    judges_others = not own_generators
    before, collects, numbers = sys.getprofile(), gc.isenabled(), _numpy_state()
    gc.disable()  # a collection may run callbacks of others, which are not the policy's doing
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(before)
        if collects:
            gc.enable()
        if _numpy_state() != numbers:  # its functions are no functions to a profiler
            draws.append("a function of numpy.random")


def _is_clock(called: object, owner: object) -> bool:
    is_loops = isinstance(owner, asyncio.AbstractEventLoop) and getattr(called, "__name__", None) == "time"
    return called in _CLOCKS or any(owner is one for one in _DATES) or is_loops  # an array is no item to look for


def _is_shared_draw(called: object, owner: object) -> bool:
    return called is os.urandom or owner is _SHARED_RANDOM


def _is_draw(owner: object, frame: FrameType) -> bool:
    return isinstance(owner, random.Random) and not _is_of_others(frame)


def _is_of_others(frame: FrameType | None) -> bool:
    """Whether a predictor or a latency model is at work in this frame or above."""
    while frame is not None:
        if isinstance(frame.f_locals.get("self"), _OTHERS):
            return True
        frame = frame.f_back
    return False


def _numpy_state() -> tuple[object, ...]:
    name, keys, *rest = np.random.get_state(legacy=True)
    return name, np.asarray(keys).tobytes(), *rest
