"""The eviction rule that a config names."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tokenyard.config import KVCacheConfig
from tokenyard.descriptors import ComponentDescriptor
from tokenyard.interfaces.eviction import COMPONENT_KIND, EvictionContext, EvictionRule
from tokenyard.launch.chosen import chosen
from tokenyard.parts import make_part

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue


def eviction_rule_maker(config: KVCacheConfig, catalogue: Catalogue) -> Callable[[int], EvictionRule] | None:
    """Makes `kv_cache.eviction` for so many blocks; raises PluginError where it cannot run here.

    None where the default one is not there: a cache manager has it anyway.
    """
    if config.eviction == KVCacheConfig().eviction and config.eviction not in catalogue.names(COMPONENT_KIND):
        return None
    descriptor = chosen(catalogue, COMPONENT_KIND, config.eviction, ComponentDescriptor)

    def make(num_blocks: int) -> EvictionRule:
        context = EvictionContext(num_blocks=num_blocks)
        return make_part(descriptor, EvictionRule, lambda part: part.factory(config.eviction_options, context))

    return make
