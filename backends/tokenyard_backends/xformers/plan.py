"""What a step's attention has to do, worked out once a step and window on the host, for all layers.

Sequences with one query row are decoded over their pages. Those with more are attended in groups, over K/V rows that
are gathered from the cache, one sequence after the other.

Legend: B = sequences that are decoded, padded, P = pages a sequence, L = gathered K/V rows of a group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenyard_backends.shared.block_tables import host_table
from tokenyard_backends.shared.uploads import to_device
from tokenyard_backends.shared.windows import window_start
from tokenyard_backends.xformers.biases import decode_bias, prompt_bias

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from tokenyard.interfaces import AttentionBatch

    from tokenyard_backends.xformers.operators import Bias, Masks

    Integers = NDArray[np.int64]

_MAX_GATHERED_ROWS = 1 << 16  # of a group with several sequences: what a layer may hold beside the cache


@dataclass(frozen=True, slots=True)
class DecodeWork:
    """Sequences with one query row each."""

    rows: torch.Tensor | None  # [B] query rows; None = all rows of the step, in order
    num_rows: int  # without padding
    bias: Bias


@dataclass(frozen=True, slots=True)
class PromptWork:
    """A group of sequences with several query rows each."""

    rows: torch.Tensor | None  # query rows; None = all rows of the step, in order
    slots: torch.Tensor | None  # [L] cache rows; None = the keys are this step's, in the rows of the queries
    bias: Bias


@dataclass(frozen=True, slots=True)
class StepWork:
    """A step, for the layers of one window."""

    decode: DecodeWork | None
    prompts: tuple[PromptWork, ...]


class StepPlan:
    """One step's plan. `work` is computed when the first layer of a window asks, and kept for the others."""

    def __init__(self, masks: Masks, batch: AttentionBatch, block_size: int) -> None:
        self.slots = batch.slot_mapping
        self._masks = masks
        self._device = batch.block_table.device
        self._table = host_table(batch)
        self._block_size = block_size
        self._query_lens: Integers = np.asarray(batch.query_lens, dtype=np.int64)
        self._context_lens: Integers = np.asarray(batch.context_lens, dtype=np.int64)
        self._first_rows: Integers = np.cumsum(self._query_lens) - self._query_lens
        self._decoding = np.flatnonzero(self._query_lens == 1)
        self._prompting = np.flatnonzero(self._query_lens > 1)
        self._work: dict[int | None, StepWork] = {}

    def work(self, window: int | None) -> StepWork:
        if window not in self._work:
            self._work[window] = StepWork(
                decode=self._decode(window) if len(self._decoding) else None,
                prompts=tuple(self._prompts(window)),
            )
        return self._work[window]

    def _decode(self, window: int | None) -> DecodeWork:
        """Pages from the first one that is seen; numbers of sequences and of pages are padded to powers of two.

        The kernel is compiled anew for each pair of these numbers.
        """
        ends = self._context_lens[self._decoding]
        starts = window_start(ends - 1, window)
        first_pages = starts // self._block_size
        last_pages = (ends - 1) // self._block_size
        num_pages = _next_power_of_two(int((last_pages - first_pages).max()) + 1)
        pages = np.minimum(first_pages[:, None] + np.arange(num_pages), last_pages[:, None])
        padding = _next_power_of_two(len(ends)) - len(ends)
        sequences = np.pad(self._decoding, (0, padding), mode="edge")
        pages = np.pad(pages, ((0, padding), (0, 0)), mode="edge")
        origins = first_pages * self._block_size
        whole_step = len(ends) == len(self._query_lens) and not padding
        bias = decode_bias(
            self._masks,
            starts=None if window is None else [*(starts - origins).tolist(), *[0] * padding],
            ends=[*(ends - origins).tolist(), *[0] * padding],
            pages=self._to_device(self._table[sequences[:, None], pages]),
            block_size=self._block_size,
        )
        rows = None if whole_step else self._to_device(self._first_rows[sequences])
        return DecodeWork(rows, len(ends), bias)

    def _prompts(self, window: int | None) -> Iterator[PromptWork]:
        starts = window_start(self._context_lens - self._query_lens, window)
        counts = self._context_lens - starts
        for group in _groups(self._prompting, counts[self._prompting]):
            yield self._prompt(group, starts[group], counts[group], window)

    def _prompt(self, group: Integers, starts: Integers, counts: Integers, window: int | None) -> PromptWork:
        """The sequences `group`, which see counts[i] positions from starts[i] on."""
        query_lens = self._query_lens[group]
        has_past = not np.array_equal(query_lens, self._context_lens[group])
        whole_step = len(group) == len(self._query_lens)
        bias = prompt_bias(
            self._masks,
            query_lens=query_lens.tolist(),
            key_lens=counts.tolist(),
            window=window,
            device=self._device,
        )
        return PromptWork(
            rows=None if whole_step else self._to_device(_ranges(self._first_rows[group], query_lens)),
            slots=self._slots(group, starts, counts) if has_past else None,
            bias=bias,
        )

    def _slots(self, group: Integers, starts: Integers, counts: Integers) -> torch.Tensor:
        """[L] cache rows of counts[i] positions from starts[i] on of each sequence."""
        positions = _ranges(starts, counts)
        blocks = self._table[np.repeat(group, counts), positions // self._block_size].astype(np.int64)
        return self._to_device(blocks * self._block_size + positions % self._block_size)

    def _to_device(self, values: NDArray[np.generic]) -> torch.Tensor:
        return to_device(values, self._device)


def _ranges(starts: Integers, counts: Integers) -> Integers:
    """starts[0], starts[0] + 1, ... counts[0] of them, then those of starts[1], and so on."""
    before = np.cumsum(counts) - counts
    ranges: Integers = np.repeat(starts - before, counts) + np.arange(counts.sum())
    return ranges


def _groups(members: Integers, counts: Integers) -> list[Integers]:
    """`members` in order, cut so that each group has _MAX_GATHERED_ROWS in all, or one member."""
    cuts, total = [], 0
    for index, count in enumerate(counts.tolist()):
        if total and total + count > _MAX_GATHERED_ROWS:
            cuts.append(index)
            total = 0
        total += count
    return np.split(members, cuts) if len(members) else []


def _next_power_of_two(number: int) -> int:
    return 1 << (number - 1).bit_length()
