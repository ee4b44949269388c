"""KV events: what entered and left a prefix cache, for observers such as a cache-aware router (since API 1.2).

Hashes are the chained digests of `tokenyard.kv_cache.hashing`: one names a block's tokens and everything before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockStored:
    """A full block can be found from now on."""

    block_hash: bytes
    parent_hash: bytes | None  # None for a request's first block
    token_ids: tuple[int, ...]  # [block_size]
    block_size: int
    group: int = 0  # KV group
    lora_name: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockRemoved:
    """The last block with this content was given to other tokens."""

    block_hash: bytes
    group: int = 0


@dataclass(frozen=True, slots=True)
class CacheCleared:
    """Everything was forgotten."""


KVEvent: TypeAlias = BlockStored | BlockRemoved | CacheCleared
