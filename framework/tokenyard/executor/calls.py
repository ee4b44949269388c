"""Where an executor's calls run: in the thread that makes them, or one after the other in a thread of their own."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, ParamSpec, Protocol, TypeVar

from tokenyard.errors import EngineDeadError

if TYPE_CHECKING:
    from tokenyard.interfaces.executor import StepFuture

P = ParamSpec("P")
ResultT = TypeVar("ResultT")


class Calls(Protocol):
    """Runs calls strictly in the order given."""

    def submit(self, function: Callable[P, ResultT], /, *args: P.args, **kwargs: P.kwargs) -> StepFuture[ResultT]:
        """Start a call."""

    def shutdown(self) -> None:
        """Wait for the call that runs; those behind it never start. A second shutdown does nothing."""


@dataclass(frozen=True, slots=True)
class Done(Generic[ResultT]):
    """A future that is done already."""

    value: ResultT

    @property
    def ready_at(self) -> float | None:
        return None

    def result(self) -> ResultT:
        return self.value


@dataclass(frozen=True, slots=True)
class Pending(Generic[ResultT]):
    """A future of another thread's call; `result` raises what the call raised, KeyboardInterrupt included."""

    future: Future[ResultT]

    @property
    def ready_at(self) -> float | None:
        return None

    def result(self) -> ResultT:
        try:
            return self.future.result()
        except CancelledError as error:
            raise EngineDeadError("the executor was shut down before this call ran") from error


class SameThread:
    """A call has run, or has raised, when `submit` returns."""

    def submit(self, function: Callable[P, ResultT], /, *args: P.args, **kwargs: P.kwargs) -> Done[ResultT]:
        return Done(function(*args, **kwargs))

    def shutdown(self) -> None:
        pass


class OwnThread:
    """`submit` returns at once. The thread starts with the first call and ends with `shutdown`."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._process = os.getpid()

    def submit(self, function: Callable[P, ResultT], /, *args: P.args, **kwargs: P.kwargs) -> Pending[ResultT]:
        if os.getpid() != self._process:
            raise EngineDeadError("an engine does not live on in a forked process; start one there")
        return Pending(self._pool.submit(function, *args, **kwargs))

    def shutdown(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)
