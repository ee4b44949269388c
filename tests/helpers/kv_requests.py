"""Requests as a K/V cache manager sees them, and what tests do with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from tokenyard.interfaces.kv_cache import Allocation, ExtraKey
from tokenyard.kv_cache import PagedKVCacheManager, RadixKVCacheManager

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.request import Retention

Manager: TypeAlias = PagedKVCacheManager | RadixKVCacheManager


@dataclass(eq=False)
class FakeRequest:
    request_id: str
    tokens: list[int]
    cache_salt: str | None = None
    lora_name: str | None = None
    skip_prefix_cache: bool = False
    extra_keys: Sequence[ExtraKey] = ()
    retention: Retention = "normal"

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    @property
    def token_ids(self) -> IntArray:
        return np.array(self.tokens, dtype=np.int32)


def start(manager: Manager, request: FakeRequest, group: int = 0) -> tuple[int, list[int]]:
    """Admit a request and compute its prompt: (hit tokens, its block table)."""
    hit = manager.lookup(request)
    allocation = manager.allocate(request, request.num_tokens, hit)
    assert allocation is not None
    manager.commit(request, request.num_tokens)
    manager.check_invariants()
    return hit.tokens, table(manager, request, group)


def decode(manager: Manager, request: FakeRequest, *tokens: int) -> list[int]:
    """Generate these tokens, one a step; returns the new blocks of group 0."""
    new: list[int] = []
    for token in tokens:
        request.tokens.append(token)
        allocation = manager.allocate(request, request.num_tokens)
        assert allocation is not None
        new += allocation.new_block_ids[0].tolist()
        manager.commit(request, request.num_tokens)
        manager.check_invariants()
    return new


def table(manager: Manager, request: FakeRequest, group: int = 0) -> list[int]:
    """The block table of a request."""
    block_ids: list[int] = manager.block_ids(request)[group].tolist()
    return block_ids


def ids(allocation: Allocation | None, group: int = 0) -> list[int]:
    """The new blocks of an allocation that must not have failed."""
    assert allocation is not None
    block_ids: list[int] = allocation.new_block_ids[group].tolist()
    return block_ids
