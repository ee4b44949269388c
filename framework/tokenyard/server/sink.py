"""BoundedSink: hands items to something that may be slow or dead, without anybody waiting for it."""

from __future__ import annotations

import collections
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

logger = logging.getLogger(__name__)

ItemT = TypeVar("ItemT")

_LARGEST_BATCH = 512


class BoundedSink(Generic[ItemT]):
    """`offer` returns at once; a thread, started by the first item, calls `write` with what has come since.

    What does not fit is dropped, and so is what `write` raises on: both are counted. For any number of threads.
    """

    def __init__(self, name: str, write: Callable[[Sequence[ItemT]], None], *, size: int) -> None:
        self.name = name
        self.num_dropped = 0
        self._write = write
        self._size = size
        self._items: collections.deque[ItemT] = collections.deque()
        self._condition = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._has_complained = False

    def offer(self, item: ItemT) -> None:
        """Pass an item on, some time soon, if there is room for it."""
        with self._condition:
            if self._is_closed or len(self._items) >= self._size:
                self.num_dropped += 1
                return
            self._items.append(item)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"tokenyard-{self.name}", daemon=True)
                self._thread.start()
            self._condition.notify()

    def close(self, seconds: float = 1.0) -> None:
        """Take nothing more, and give what is there so long to be written; a writer that hangs is left behind."""
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        if self._thread is not None:
            self._thread.join(seconds)

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._items and not self._is_closed:
                    self._condition.wait()
                if not self._items:
                    return
                batch = [self._items.popleft() for _ in range(min(len(self._items), _LARGEST_BATCH))]
            try:
                self._write(batch)
            except Exception as error:
                with self._condition:
                    self.num_dropped += len(batch)
                self._complain(error)

    def _complain(self, error: Exception) -> None:
        if not self._has_complained:
            self._has_complained = True
            logger.warning("%s: what could not be written is dropped and counted (%s)", self.name, error)
