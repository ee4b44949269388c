"""`kv_cache.eviction=lfu`: the content with the fewest hits goes first; old fame fades (Arlitt et al., 1999)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.kv_cache import RankedEviction

if TYPE_CHECKING:
    from tokenyard.interfaces import EvictionContext, EvictionRule


@dataclass(frozen=True, slots=True, kw_only=True)
class LFUOptions:
    """Options of the rule, in `kv_cache.eviction={name: lfu, ...}`."""

    ageing: bool = True  # content that is no longer hit loses its rank to newer one; false = hits count for ever


class LFUEviction(RankedEviction):
    """By hits of the content; of equals, what became free first.

    With ageing (LFU-DA), content has the rank of its hits plus the age of the cache when it was written or last hit.
    The age is the highest rank that was evicted so far: what is written now starts beside what goes next.
    """

    def __init__(self, num_blocks: int, *, ageing: bool) -> None:
        super().__init__(num_blocks)
        self._ageing = ageing
        self._age = 0
        self._hits = [0] * (num_blocks + 1)
        self._ranks = [0] * (num_blocks + 1)

    def on_written(self, block_ids: Sequence[int]) -> None:
        super().on_written(block_ids)
        for block_id in block_ids:
            self._hits[block_id] = 0
            self._ranks[block_id] = self._age

    def on_hit(self, block_ids: Sequence[int]) -> None:
        for block_id in block_ids:
            self._hits[block_id] += 1
            self._ranks[block_id] = self._age + self._hits[block_id]

    def rank(self, block_id: int) -> int:
        return self._ranks[block_id]

    def on_evicted(self, block_id: int, rank: int) -> None:
        if self._ageing:
            self._age = max(self._age, rank)  # what was held meanwhile may have a lower one


def _make(options: LFUOptions, context: EvictionContext) -> EvictionRule:
    return LFUEviction(context.num_blocks, ageing=options.ageing)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[LFUOptions]]:
    yield ComponentDescriptor(
        component_kind="eviction",
        name="lfu",
        api_version=(1, 7),
        summary="what was hit least goes first, with ageing",
        options_type=LFUOptions,
        factory=_make,
    )
