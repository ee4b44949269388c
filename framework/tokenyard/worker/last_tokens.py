"""LastTokens: what each slot sampled last, on the device: the next step's input before the host has seen it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tokenyard.arrays import LongArray


class LastTokens:
    """In a step's inputs the id -1 - slot stands for the token that the slot sampled last."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._token_ids = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def has(self, slots: LongArray) -> bool:
        """Whether there is room for all of them: a scheduler may name more slots than were expected."""
        return len(slots) == 0 or int(slots.max()) < len(self._token_ids)

    @staticmethod
    def stand_ins(slots: LongArray) -> LongArray:
        """The ids [N] that stand for what these slots [N] sampled last."""
        return -1 - slots

    def store(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Remember the tokens [N] int64 of slots [N] int64, both on the device."""
        self._token_ids.index_copy_(0, slots, token_ids)

    def fill(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Input ids [T] with tokens instead of what stands for them; a new tensor."""
        slots = (-1 - token_ids).clamp_min(0)
        return torch.where(token_ids < 0, self._token_ids[slots], token_ids)
