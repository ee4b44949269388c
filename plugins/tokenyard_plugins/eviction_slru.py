"""`kv_cache.eviction=slru`: segmented LRU; content that was never hit goes first (Karedla et al., 1994)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.errors import ConfigError
from tokenyard.kv_cache import EmptyFirst

if TYPE_CHECKING:
    from tokenyard.interfaces import EvictionContext, EvictionRule


@dataclass(frozen=True, slots=True, kw_only=True)
class SLRUOptions:
    """Options of the rule, in `kv_cache.eviction={name: slru, ...}`."""

    protected_share: float = 0.8  # of all blocks: most that the protected segment has


class SLRUEviction(EmptyFirst):
    """Two segments, each by when a block became free: probation goes before protected.

    Content starts on probation and is protected once it was hit. When the protected segment has more than its share,
    what became free in it longest ago goes back to probation, as the newest there.
    """

    def __init__(self, num_blocks: int, *, protected_share: float) -> None:
        super().__init__(num_blocks)
        self._most_protected = int(protected_share * num_blocks)
        self._was_hit = bytearray(num_blocks + 1)
        self._probation: OrderedDict[int, None] = OrderedDict()  # free blocks, what goes first in front
        self._protected: OrderedDict[int, None] = OrderedDict()

    @property
    def num_cached(self) -> int:
        return len(self._probation) + len(self._protected)

    def holds(self, block_id: int) -> bool:
        return block_id in self._probation or block_id in self._protected

    def insert(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            segment = self._protected if self._was_hit[block_id] else self._probation
            segment[block_id] = None
        while len(self._protected) > self._most_protected:
            block_id, _ = self._protected.popitem(last=False)
            self._probation[block_id] = None

    def take(self, block_id: int) -> None:
        segment = self._protected if block_id in self._protected else self._probation
        del segment[block_id]

    def evict(self, count: int) -> list[int]:
        return [(self._probation or self._protected).popitem(last=False)[0] for _ in range(count)]

    def on_written(self, block_ids: Sequence[int]) -> None:
        super().on_written(block_ids)
        for block_id in block_ids:
            self._was_hit[block_id] = False

    def on_hit(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._was_hit[block_id] = True


def _make(options: SLRUOptions, context: EvictionContext) -> EvictionRule:
    share = options.protected_share
    if not 0 < share <= 1:  # also refuses NaN
        raise ConfigError(
            f"kv_cache.eviction.protected_share={share} is not valid: it must be a share of the blocks, above 0 and up "
            "to 1"
        )
    return SLRUEviction(context.num_blocks, protected_share=share)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[SLRUOptions]]:
    yield ComponentDescriptor(
        component_kind="eviction",
        name="slru",
        api_version=(1, 7),
        summary="what was never hit goes first, then what was hit longest ago",
        options_type=SLRUOptions,
        factory=_make,
    )
