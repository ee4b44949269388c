"""Ctrl-C between steps: in the middle of one it would leave a K/V cache in an unknown state and cost the engine."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def interrupts_between_steps() -> Iterator[Callable[[], None]]:
    """While open, Ctrl-C waits for the function that is yielded, which raises KeyboardInterrupt; a second one does not.

    Only in the main thread and where Python's own handler is in place: somebody else's is left alone.
    """
    is_ours = (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )
    if not is_ours:
        yield lambda: None
        return
    received = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if received.is_set():
            signal.default_int_handler(number, frame)
        received.set()

    def check() -> None:
        if received.is_set():
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, handle)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
