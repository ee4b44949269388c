"""Ranks that are threads of this process: what RankGroup promises, without processes and sockets."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from tokenyard.model.ranks import RankGroup

T = TypeVar("T")

_DEADLINE = 60.0  # seconds for an operation of all


class _Meeting:
    """Where the ranks lay down a tensor each and look at all of them."""

    def __init__(self, size: int) -> None:
        self._barrier = threading.Barrier(size, timeout=_DEADLINE)
        self._places: list[torch.Tensor] = [torch.empty(0)] * size

    def exchange(self, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        self._places[rank] = tensor.clone()
        self._barrier.wait()
        found = list(self._places)
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class ThreadRanks(RankGroup):
    """One of them. `calls` has the operations in order, with the shapes of its tensors."""

    def __init__(self, meeting: _Meeting, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self.calls: list[tuple[str, tuple[int, ...]]] = []
        self._meeting = meeting

    def wait_for_all(self) -> None:
        self._meeting.exchange(self.rank, torch.empty(0))

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange("sum", tensor)).sum(0, dtype=tensor.dtype)

    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        found = self._exchange("gather", tensor)
        return torch.cat(found, -1) if self.is_leader else None

    def from_leader(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchange("from_leader", tensor)[0]

    def _exchange(self, name: str, tensor: torch.Tensor) -> list[torch.Tensor]:
        self.calls.append((name, tuple(tensor.shape)))
        found = self._meeting.exchange(self.rank, tensor)
        assert len({(one.shape, one.dtype) for one in found}) == 1, f"the ranks brought {found} to {name}"
        return found


def run_ranks(size: int, work: Callable[[RankGroup], T]) -> list[T]:
    """What `work` returns for each of so many ranks, and that all of them made the same calls."""
    meeting = _Meeting(size)
    groups = [ThreadRanks(meeting, rank, size) for rank in range(size)]

    def run(group: ThreadRanks) -> T:
        try:
            return work(group)
        except BaseException:
            meeting.abort()  # the others would wait in vain
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, group) for group in groups]
    _raise_first([future.exception() for future in futures])
    assert all(group.calls == groups[0].calls for group in groups)
    return [future.result() for future in futures]


def _raise_first(errors: Sequence[BaseException | None]) -> None:
    found = [error for error in errors if error is not None]
    for error in sorted(found, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
