"""Biases: which keys each query row sees, told to xformers' operators as lengths."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from tokenyard_backends.xformers.operators import Bias, Masks


def decode_bias(
    masks: Masks,
    *,
    starts: Sequence[int] | None,  # first position that each sequence sees, in its pages; None = 0
    ends: Sequence[int],  # position after the last one; 0 = sees nothing
    pages: torch.Tensor,  # [N, P] int32
    block_size: int,
) -> Bias:
    """One query row a sequence, which sees the positions `starts[i] : ends[i]` of pages[i]."""
    queries = [1] * len(ends)
    if starts is None:
        return masks.PagedBlockDiagonalPaddedKeysMask.from_seqlens(
            queries, ends, pages, block_size, device=pages.device
        )
    room = pages.shape[1] * block_size
    # Not PagedBlockDiagonalGappyKeysMask.from_seqlens: in 0.0.35 it raises ValueError whatever it is given.
    unpaged = masks.BlockDiagonalGappyKeysMask.from_seqlens(
        queries,
        [*(index * room + start for index, start in enumerate(starts)), len(starts) * room],
        [end - start for start, end in zip(starts, ends, strict=True)],
        device=pages.device,
    )
    return unpaged.make_paged(
        block_tables=pages,
        page_size=block_size,
        notional_padding=room,
        paged_type=masks.PagedBlockDiagonalGappyKeysMask,
    )


def prompt_bias(
    masks: Masks,
    *,
    query_lens: Sequence[int],
    key_lens: Sequence[int],  # at least query_lens: the queries are the last of the keys
    window: int | None,
    device: torch.device,
) -> Bias:
    """Causal from each sequence's last row upwards, at most `window` keys."""
    blocks = masks.BlockDiagonalMask.from_seqlens(query_lens, key_lens, device=device)
    if window is None:
        return blocks.make_causal_from_bottomright()
    return blocks.make_local_attention_from_bottomright(window)
