"""Drain: from the first signal until nothing runs any more."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.server.service import Service

logger = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_DELIVERY = 0.8  # seconds for clients to take the end of what was aborted
_POLL = 0.02  # seconds


class Drain:
    """New requests are refused; those that run have `server.shutdown_timeout` seconds, and are then aborted."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._is_wanted = asyncio.Event()
        self._is_urgent = asyncio.Event()

    def request(self) -> None:
        """The first time: end in an orderly way. The second time: end now."""
        if self._is_wanted.is_set():
            self._is_urgent.set()
        self._service.is_draining = True
        self._is_wanted.set()

    async def run(self) -> None:
        """Returns when it was requested, and no request is left whose client still takes its answer."""
        await self._is_wanted.wait()
        timeout = self._service.config.server.shutdown_timeout
        if self._service.num_open:
            logger.info("shutting down: %s, for at most %g s", _open_requests(self._service.num_open), timeout)
        else:
            logger.info("shutting down")
        await self._until_idle(timeout, self._is_urgent.is_set)
        if self._service.num_open:
            logger.info("aborting: %s", _open_requests(self._service.num_open))
            await self._until_idle(_DELIVERY, self._abort_all)

    def _abort_all(self) -> bool:
        """Again and again: one that was let in before the signal may come to the engine only now."""
        if self._service.llm is not None:
            self._service.llm.abort_all()
        return False

    async def _until_idle(self, timeout: float, is_over: Callable[[], bool]) -> None:
        """Until no request is open, or the time is up; `is_over` is asked all the time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                while self._service.num_open and not is_over():
                    await asyncio.sleep(_POLL)


def _open_requests(count: int) -> str:
    return "1 request is open" if count == 1 else f"{count} requests are open"


@contextlib.contextmanager
def signals_to(drain: Drain) -> Iterator[None]:
    """SIGTERM and SIGINT request a drain, in the running loop and where this is the main thread; else nothing."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    loop = asyncio.get_running_loop()
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    for number in _SIGNALS:
        loop.add_signal_handler(number, drain.request)
    try:
        yield
    finally:
        for number, handler in before.items():
            loop.remove_signal_handler(number)
            signal.signal(number, handler)
