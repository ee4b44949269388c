"""What a step's attention has to do, worked out once a step on the host, for all layers.

Sequences with one query row are decoded: their K/V may be split among several programs. The others are cut into tiles
of query tokens. So a decoding sequence takes the same kernel, and the same splits, in every batch: nothing of its
result depends on the others.

Legend: R = decoding rows of the step, P = tiles of prompts, H = query heads, DV = head size of values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenyard_backends.shared.uploads import to_device

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenyard.interfaces import AttentionBatch

    Integers = NDArray[np.int32]

MAX_SPLITS = 32  # of one decoding row


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPlan:
    """One step's plan; kernels read lengths from the device, so that a plan for the longest serves every replay."""

    batch: AttentionBatch
    sequences: torch.Tensor  # [R] int32: of which sequence each decoding row is
    longest: int  # K/V tokens of the longest decoding sequence
    tiles: torch.Tensor  # [P, 2] int32: sequence, and first query row of the sequence's
    split_out: torch.Tensor  # [R, H, splits, DV] float32, flat, and perhaps with room for more
    split_lse: torch.Tensor  # [R, H, splits] float32, likewise


def decoding_sequences(batch: AttentionBatch) -> Integers:
    """[R] sequences with one query row."""
    return np.flatnonzero(np.asarray(batch.query_lens) == 1).astype(np.int32)


def prompt_tiles(batch: AttentionBatch, tokens: int) -> Integers:
    """[P, 2] tiles of `tokens` query tokens of every other sequence, those with the most K/V to read first."""
    query_lens, context_lens = (np.asarray(lens, dtype=np.int32) for lens in (batch.query_lens, batch.context_lens))
    sequences = np.flatnonzero(query_lens > 1).astype(np.int32)
    counts = -(-query_lens[sequences] // tokens)
    of_tile = np.repeat(sequences, counts)
    first = (np.arange(len(of_tile)) - np.repeat(np.cumsum(counts) - counts, counts)) * tokens
    num_keys = context_lens[of_tile] - query_lens[of_tile] + first
    order = np.argsort(-num_keys, kind="stable")
    return np.stack((of_tile, first.astype(np.int32)), 1)[order]


def packed_to_device(sequences: Integers, tiles: Integers, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """[R] and [P, 2] there, by one copy."""
    numbers = to_device(np.concatenate((sequences, tiles.reshape(-1))), device)
    return numbers[: len(sequences)], numbers[len(sequences) :].view(-1, 2)


def most_splits(longest: int, window: int | None, split_tokens: int) -> int:
    """At least as many as any sequence of up to `longest` tokens has: a grid, or room for partial results."""
    visible = longest if window is None else min(longest, window)
    return max(1, min(MAX_SPLITS, -(-visible // split_tokens)))


class GrowingBuffer:
    """Memory on a device that several plans share, one after the other; a greater one replaces it when needed.

    A plan holds what it was given: recorded calls keep writing there.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._tensor = torch.empty(0, device=device, dtype=dtype)

    def take(self, size: int) -> torch.Tensor:
        """At least `size` elements."""
        if self._tensor.numel() < size:
            self._tensor = self._tensor.new_empty(size)
        return self._tensor


class Counting:
    """0, 1, 2, ... on a device, as many as were asked for."""

    def __init__(self, device: torch.device) -> None:
        self._tensor = torch.empty(0, device=device, dtype=torch.int32)

    def take(self, size: int) -> torch.Tensor:
        if self._tensor.numel() < size:
            self._tensor = torch.arange(max(size, 256), device=self._tensor.device, dtype=torch.int32)
        return self._tensor[:size]
