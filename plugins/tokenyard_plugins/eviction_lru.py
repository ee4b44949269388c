"""`kv_cache.eviction=lru`: the content that was used longest ago goes first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl

if TYPE_CHECKING:
    from tokenyard.config import NoOptions
    from tokenyard.interfaces import EvictionContext, EvictionRule


def _make(options: NoOptions, context: EvictionContext) -> EvictionRule:
    from tokenyard.kv_cache import LRUEviction  # only when chosen

    return LRUEviction(context.num_blocks)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[NoOptions]]:
    yield ComponentDescriptor(
        component_kind="eviction",
        name="lru",
        api_version=(1, 7),
        summary="what was used longest ago goes first",
        factory=_make,
    )
