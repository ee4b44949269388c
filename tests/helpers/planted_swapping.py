"""K/V managers with a fault each in what plugin API 1.6 added: swapping, own blocks, versions, names of blocks."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from tokenyard.config import NoOptions
from tokenyard.descriptors import KVCacheManagerDescriptor
from tokenyard.interfaces import Hit, KVCacheManager, KVCacheManagerContext, KVRequest
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.scheduler_output import HostTransfer


class Right(PagedKVCacheManager):
    """The built-in one."""


class NeverSwaps(Right):
    """Refuses although there is room."""

    def swap_out(self, request: KVRequest, num_computed_tokens: int) -> bool:
        return False


class SwapsAndSaysNo(Right):
    """Takes it to host memory, and says that it did not."""

    def swap_out(self, request: KVRequest, num_computed_tokens: int) -> bool:
        super().swap_out(request, num_computed_tokens)
        return False


class FreesWhatItSwaps(Right):
    """Gives the blocks of the device back at once."""

    def swap_out(self, request: KVRequest, num_computed_tokens: int) -> bool:
        is_done = super().swap_out(request, num_computed_tokens)
        if is_done:
            self.free(request)
        return is_done


class NeverForgets(Right):
    """Host memory of who has ended stays taken."""

    def forget_swapped(self, request: KVRequest) -> None:
        return


class SwapsBlocks(Right):
    """Copies back in another order than it copied out."""

    def take_transfers(self) -> Sequence[HostTransfer]:
        return [
            transfer if transfer.to_host else transfer._replace(host_block_ids=transfer.host_block_ids[::-1].copy())
            for transfer in super().take_transfers()
        ]


class LosesACopy(Right):
    """Of several copies of a step it tells the last one."""

    def take_transfers(self) -> Sequence[HostTransfer]:
        return list(super().take_transfers())[-1:]


class CopiesNowhere(Right):
    """To host blocks that there are none."""

    def take_transfers(self) -> Sequence[HostTransfer]:
        return [one._replace(host_block_ids=one.host_block_ids + 1000) for one in super().take_transfers()]


class CountsSharedBlocks(Right):
    """As if everything in its tables were a request's own."""

    def num_exclusive_blocks(self, request: KVRequest) -> int:
        return KVCacheManager.num_exclusive_blocks(self, request)


class ForgetsThatIdleBlocksAreFree(Right):
    """As if the blocks of a hit were always in somebody's tables."""

    def num_saved_blocks(self, request: KVRequest, hit: Hit, without: Sequence[KVRequest] = ()) -> int:
        return hit.tokens // self._block_size * len(self.block_ids(request))


class StandsStill(Right):
    """One version for ever."""

    @property
    def prefix_version(self) -> int:
        return 7


class NamesBlocksAlone(Right):
    """Names that tell a block's own tokens, and not what is before it."""

    def prefix_hashes(self, request: KVRequest) -> Sequence[bytes]:
        tokens = request.token_ids
        return [tokens[start : start + 4].tobytes() for start in range(0, (request.num_tokens - 1) // 4 * 4, 4)]


class ReadsAClock(Right):
    """When something was freed might decide what goes first."""

    def free(self, request: KVRequest) -> None:
        time.monotonic()
        super().free(request)


def manager(make: Callable[..., KVCacheManager]) -> KVCacheManagerDescriptor[NoOptions]:
    def factory(options: NoOptions, context: KVCacheManagerContext) -> KVCacheManager:
        return make(
            num_blocks=context.num_blocks,
            block_size=context.config.block_size,
            enable_prefix_caching=context.config.enable_prefix_caching,
            group_windows=context.group_windows,
            num_host_blocks=context.num_host_blocks,
        )

    return dataclasses.replace(
        KVCacheManagerDescriptor(name="planted", api_version=(1, 7), factory=factory), summary=make.__name__
    )
