"""Which pages each sequence of a step reads, from the host's arrays: block table -> compressed rows.

A page is a block. Pages that a sliding window has left behind are not listed: the block manager may have given them
to others, and nothing of them may be read. FlashInfer counts positions from the end of both queries and keys, so that
leaving out leading pages changes neither its causal mask nor its window.

Legend: N = sequences, P = pages of all sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenyard_backends.shared.block_tables import host_table
from tokenyard_backends.shared.uploads import for_upload

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.interfaces import AttentionBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class HostBatch:
    """A step of one KV group on the host."""

    query_lens: IntArray  # [N]
    context_lens: IntArray  # [N] at least the query lengths
    block_table: IntArray  # [N, max_blocks]

    @classmethod
    def of(cls, batch: AttentionBatch) -> HostBatch:
        return cls(
            query_lens=np.asarray(batch.query_lens, dtype=np.int32),
            context_lens=np.asarray(batch.context_lens, dtype=np.int32),
            block_table=host_table(batch),
        )

    @property
    def is_decode(self) -> bool:
        """Whether every sequence has one query row."""
        return bool((self.query_lens == 1).all())


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Compressed rows: sequence i reads page_ids[page_start[i] : page_start[i + 1]]. int32 throughout."""

    query_start: IntArray  # [N + 1]
    page_start: IntArray  # [N + 1]
    page_ids: IntArray  # [P]
    last_page_len: IntArray  # [N] tokens in the last page, 1 to block size


def pages_of(batch: HostBatch, block_size: int, *, window: int | None = None, skipped_blocks: int = 0) -> Pages:
    """The pages that hold what a step's queries see, without each sequence's first `skipped_blocks`."""
    lengths = batch.context_lens
    first = np.full_like(lengths, skipped_blocks)
    if window is not None:
        first = np.maximum(first, (lengths - batch.query_lens - window + 1) // block_size)
    counts = -(-lengths // block_size) - first
    page_start = _starts(counts)
    rows = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
    columns = np.arange(page_start[-1], dtype=np.int32) - np.repeat(page_start[:-1] - first, counts)
    return Pages(
        query_start=_starts(batch.query_lens),
        page_start=page_start,
        page_ids=batch.block_table[rows, columns].astype(np.int32, copy=False),
        last_page_len=(lengths - 1) % block_size + 1,
    )


def prefix_pages(batch: HostBatch, block_size: int, num_blocks: int) -> Pages:
    """The first `num_blocks`, full and alike in every sequence, as one sequence that all query rows belong to."""
    return Pages(
        query_start=np.array([0, batch.query_lens.sum()], dtype=np.int32),
        page_start=np.array([0, num_blocks], dtype=np.int32),
        page_ids=batch.block_table[0, :num_blocks].astype(np.int32, copy=False),
        last_page_len=np.array([block_size], dtype=np.int32),
    )


def num_shared_blocks(batch: HostBatch, block_size: int) -> int:
    """Leading blocks that all sequences have in common and whose tokens are before every query of the step."""
    limit = int((batch.context_lens - batch.query_lens).min()) // block_size
    is_shared = (batch.block_table[:, :limit] == batch.block_table[0, :limit]).all(axis=0)
    return limit if is_shared.all() else int(is_shared.argmin())


def max_pages(max_context_len: int, block_size: int, window: int | None) -> int:
    """The most pages that a decoding sequence of at most `max_context_len` tokens reads."""
    most = -(-max_context_len // block_size)
    return most if window is None else min(most, -(-(window - 1) // block_size) + 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PageTensors:
    """Pages as FlashInfer's `plan` takes them without a wait: page ids on the device, the others on the host."""

    query_start: torch.Tensor
    page_start: torch.Tensor
    page_ids: torch.Tensor
    last_page_len: torch.Tensor


def to_tensors(pages: Pages, device: torch.device) -> PageTensors:
    """Tensors of one int32 buffer, pinned where the device is a GPU, so that copies of it need not be waited for."""
    parts = (pages.query_start, pages.page_start, pages.last_page_len, pages.page_ids)
    buffer = for_upload(np.concatenate(parts), device)
    query_start, page_start, last_page_len, page_ids = torch.split(buffer, [len(part) for part in parts])
    return PageTensors(
        query_start=query_start,
        page_start=page_start,
        page_ids=page_ids.to(device, non_blocking=True),
        last_page_len=last_page_len,
    )


def _starts(counts: IntArray) -> IntArray:
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts
