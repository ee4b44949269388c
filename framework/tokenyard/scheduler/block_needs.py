"""num_blocks_needed: what a waiting request takes from the free blocks to enter."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.interfaces.kv_cache import KVCacheManager, KVRequest


def num_blocks_needed(
    kv_cache_manager: KVCacheManager, request: KVRequest, block_size: int, without: Sequence[KVRequest] = ()
) -> int:
    """Blocks for all its known tokens, in all K/V groups, but for those that it shares with who holds them.

    Cached blocks that nobody holds count as free, so they are among those that are needed: also those that nobody would
    hold any more if the requests of `without` gave up theirs.
    """
    num_blocks = -(-request.num_tokens // block_size) * len(kv_cache_manager.block_ids(request))
    return num_blocks - kv_cache_manager.num_saved_blocks(request, kv_cache_manager.lookup(request), without)
