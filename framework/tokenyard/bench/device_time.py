"""Time on a device and how fast its memory is read: what an attention kernel is measured with, and against."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

_UNKNOWN_CACHE = 32 * 2**20
_LEAST_BUFFER, _LEAST_GPU_BUFFER = 2**28, 2**31  # bytes; a GPU reads 2 GiB in half a millisecond
_CACHES_IN_BUFFER = 8
_MAX_BUFFER = 2**32
_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}


def seconds_on(device: torch.device, call: Callable[[], object]) -> float:
    """Seconds that `call` takes; on a GPU from its first kernel to its last, by events, and waits for them."""
    if device.type != "cuda":
        began = perf_counter()
        call()
        return perf_counter() - began
    began_event, ended_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began_event.record()
    call()
    ended_event.record()
    ended_event.synchronize()
    milliseconds: float = began_event.elapsed_time(ended_event)
    return milliseconds / 1000


def last_level_cache(device: torch.device) -> int:
    """Bytes of the largest cache before the memory; a guess of 32 MiB where the system does not tell."""
    if device.type == "cuda":
        size: int = torch.cuda.get_device_properties(device).L2_cache_size
        return size
    found = [_bytes(path) for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max(found, default=_UNKNOWN_CACHE)


def _bytes(path: Path) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)", path.read_text(encoding="ascii").strip())
    return int(match[1]) * _UNITS.get(match[2], 1) if match is not None else 0


class ReadSpeed:
    """Reads a buffer far larger than any cache with `sum()`, when asked to, among what it is compared with."""

    def __init__(self, device: torch.device) -> None:
        least = _LEAST_GPU_BUFFER if device.type == "cuda" else _LEAST_BUFFER
        num_bytes = min(_MAX_BUFFER, max(least, _CACHES_IN_BUFFER * last_level_cache(device)))
        self._device = device
        self._buffer = torch.ones(num_bytes // 4, device=device)
        self._seconds: list[float] = []
        self._buffer.sum()

    def measure(self) -> None:
        """Once more."""
        self._seconds.append(seconds_on(self._device, self._buffer.sum))

    def bytes_per_second(self) -> float:
        """The median of what was measured since the last call, which is forgotten."""
        ordered = sorted(self._seconds)
        self._seconds = []
        return 4 * self._buffer.numel() / ordered[len(ordered) // 2]
