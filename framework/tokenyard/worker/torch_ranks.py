"""Ranks that talk through torch.distributed: gloo on CPUs, NCCL on GPUs, all on this machine.

They meet in a folder that nobody else can enter, through a file, and their connections are bound to the loopback
interface: nothing listens to the network. Tensors are all that they send each other.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from tokenyard.errors import EngineDeadError
from tokenyard.model.ranks import RankGroup

_LOOPBACK = "lo" if sys.platform == "linux" else "lo0"
_FOREVER = timedelta(days=365)  # who waits longer than it should is ended by the executor
_ALMOST = 0.9


class LateRankError(EngineDeadError):
    """A rank did not come to an operation of all; the message names it."""


class LostRankError(EngineDeadError):
    """The connection to another rank broke: it has ended."""


class TorchRanks(RankGroup):
    """One rank of a process of its own. Made by all ranks at once: it returns when all of them have.

    An operation that some rank does not come to within `timeout` seconds raises LateRankError, which names that rank.
    """

    def __init__(self, folder: Path, *, rank: int, size: int, timeout: float, device_type: str) -> None:
        self.rank, self.size = rank, size
        self._timeout = timeout
        self._num_meetings = 0
        self._arrivals = _Arrivals(folder / "arrivals", size)
        self._store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]  # but documented
        self.wait_for_all()
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            os.environ[name] = _LOOPBACK
        with self._called():
            dist.init_process_group(
                backend="nccl" if device_type == "cuda" else "gloo",
                store=self._store,
                rank=rank,
                world_size=size,
                timeout=timedelta(seconds=timeout),
            )

    def wait_for_all(self) -> None:
        self._num_meetings += 1
        names = [f"meeting {self._num_meetings} rank {rank}" for rank in range(self.size)]
        self._store.set(names[self.rank], "here")
        self._store.wait(names, _FOREVER)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._called():
            dist.all_reduce(tensor)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        parts = [torch.empty_like(tensor) for _ in range(self.size)] if self.is_leader else None
        with self._called():
            dist.gather(tensor, parts, dst=0)
        return None if parts is None else torch.cat(parts, -1)

    def from_leader(self, tensor: torch.Tensor) -> torch.Tensor:
        with self._called():
            dist.broadcast(tensor, src=0)
        return tensor

    def close(self) -> None:
        """Leave the group; the others need not do it at the same time."""
        if dist.is_initialized():
            dist.destroy_process_group()

    @contextmanager
    def _called(self) -> Iterator[None]:
        """Around an operation of all ranks: torch tells what became of a socket, not who was late."""
        self._arrivals.arrive(self.rank)
        started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            late = self._arrivals.behind(self.rank)
            if not late or time.monotonic() - started < _ALMOST * self._timeout:
                raise LostRankError(f"the connection between the ranks broke: {str(error).splitlines()[0]}") from error
            raise LateRankError(
                f"waited {self._timeout:g} s (executor.collective_timeout) for rank {' and '.join(map(str, late))}, "
                "which did not come to an operation of all ranks"
            ) from error


class _Arrivals:
    """How many operations each rank has come to, in memory that all of them share."""

    def __init__(self, path: Path, size: int) -> None:
        """The file is there already, with eight bytes for each rank."""
        self._counts = np.memmap(path, dtype=np.int64, mode="r+", shape=(size,))

    def arrive(self, rank: int) -> None:
        self._counts[rank] += 1

    def behind(self, rank: int) -> list[int]:
        """Ranks that have not come to what this one waits in."""
        return np.flatnonzero(self._counts < self._counts[rank]).tolist()
