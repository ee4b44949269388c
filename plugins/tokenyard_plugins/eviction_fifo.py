"""`kv_cache.eviction=fifo`: the content that was written first goes first, however often it was hit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.kv_cache import RankedEviction

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import EvictionContext, EvictionRule


class FIFOEviction(RankedEviction):
    """By the order of writing. Of what was written at once, the end of a prefix goes before its start."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks)
        self._num_written = 0
        self._places = [0] * (num_blocks + 1)  # by block: in the order of writing

    def on_written(self, block_ids: Sequence[int]) -> None:
        super().on_written(block_ids)
        for block_id in reversed(block_ids):
            self._num_written += 1
            self._places[block_id] = self._num_written

    def rank(self, block_id: int) -> int:
        return self._places[block_id]


def _make(options: NoOptions, context: EvictionContext) -> EvictionRule:
    return FIFOEviction(context.num_blocks)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[NoOptions]]:
    yield ComponentDescriptor(
        component_kind="eviction",
        name="fifo",
        api_version=(1, 7),
        summary="what was written first goes first",
        factory=_make,
    )
