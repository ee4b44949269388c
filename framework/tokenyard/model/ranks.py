"""Ranks: the processes that share one model, and what they tell each other in a step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class RankGroup(ABC):
    """One rank's view of all. Every rank makes the same calls in the same order with tensors of the same shapes."""

    rank: int
    size: int

    @property
    def is_leader(self) -> bool:
        """Whether this rank samples, and answers for all."""
        return self.rank == 0

    def span(self, total: int) -> slice:
        """This rank's part of `total` things, of which each rank has as many; the last ones may have fewer, or none."""
        width = -(-total // self.size)
        return slice(min(self.rank * width, total), min((self.rank + 1) * width, total))

    @abstractmethod
    def wait_for_all(self) -> None:
        """Until every rank is here, however long it takes: ranks load at their own pace."""

    @abstractmethod
    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over the ranks, on each of them the same to the last bit; `tensor` may be written to."""

    @abstractmethod
    def gather(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """Their tensors [N, K] side by side, [N, size * K], at the leader; None elsewhere."""

    @abstractmethod
    def from_leader(self, tensor: torch.Tensor) -> torch.Tensor:
        """The leader's tensor; the others' say its shape and may be written to."""


class OneRank(RankGroup):
    """The whole model is here."""

    rank, size = 0, 1

    def wait_for_all(self) -> None:
        pass

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def from_leader(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


ONE_RANK = OneRank()
