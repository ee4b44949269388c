"""KVView: a K/V manager's state, for assertions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.interfaces.kv_cache import KVCacheManager


class KVView:
    """The K/V cache of a harness."""

    def __init__(self, manager: KVCacheManager) -> None:
        self._manager = manager

    @property
    def num_free(self) -> int:
        return self._manager.usage.num_free_blocks

    @property
    def num_total(self) -> int:
        return self._manager.usage.num_total_blocks

    @property
    def ref_counts(self) -> Mapping[int, int]:
        """Of every usable block id: in how many block tables it is."""
        return self._manager.inspect().ref_counts

    @property
    def cached_hashes(self) -> frozenset[bytes]:
        """Keys under which a block can be found."""
        return self._manager.inspect().cached_hashes
