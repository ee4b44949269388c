"""Block tables on the host."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.interfaces import AttentionBatch


def host_table(batch: AttentionBatch) -> IntArray:
    """[N, max_blocks] `block_table`; only a runner for an API before 1.4 makes this wait for the device."""
    table = batch.host_block_table
    return batch.block_table.cpu().numpy() if table is None else table
