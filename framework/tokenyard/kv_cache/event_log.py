"""KVEventLog: what entered and left the prefix cache, until somebody takes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from tokenyard.kv_cache.groups import split_key
from tokenyard.kv_events import BlockRemoved, BlockStored, CacheCleared, KVEvent

if TYPE_CHECKING:
    from tokenyard.interfaces.kv_cache import KVRequest


class KVEventLog:
    """Events in the order in which they happened."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._events: list[KVEvent] = []

    def add_stored(self, request: KVRequest, digests: Sequence[bytes], block: int, group: int) -> None:
        """Block number `block` of `request` can be found from now on."""
        start = block * self._block_size
        self._events.append(
            BlockStored(
                block_hash=digests[block],
                parent_hash=digests[block - 1] if block else None,
                token_ids=tuple(request.token_ids[start : start + self._block_size].tolist()),
                block_size=self._block_size,
                group=group,
                lora_name=request.lora_name,
            )
        )

    def add_removed(self, key: bytes) -> None:
        """The last block of this name in the pool is used for something else."""
        digest, group = split_key(key)
        self._events.append(BlockRemoved(block_hash=digest, group=group))

    def add_cleared(self) -> None:
        self._events.append(CacheCleared())

    def take(self) -> Sequence[KVEvent]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
