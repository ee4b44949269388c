"""KVCacheManager: who holds which block of the K/V cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tokenyard.errors import UnsupportedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from tokenyard.arrays import IntArray
    from tokenyard.config import KVCacheConfig
    from tokenyard.interfaces.eviction import EvictionRule
    from tokenyard.kv_events import KVEvent
    from tokenyard.request import Retention
    from tokenyard.scheduler_output import HostTransfer


class ExtraKey(NamedTuple):
    """Content at prompt positions start .. end that its token ids do not tell, such as an image (since API 1.2).

    Blocks that overlap the range are shared only between requests that have an equal key at the same range.
    """

    key: str  # a digest of the content
    start: int
    end: int


class KVRequest(Protocol):
    """What a manager may read of a request."""

    @property
    def request_id(self) -> str: ...

    @property
    def num_tokens(self) -> int:
        """Tokens known so far: prompt and delivered output."""

    @property
    def token_ids(self) -> IntArray:
        """[num_tokens] a view, valid until the next step."""

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def lora_name(self) -> str | None: ...

    @property
    def skip_prefix_cache(self) -> bool:
        """True when the request must compute every prompt token itself (it may still fill the cache)."""

    @property
    def extra_keys(self) -> Sequence[ExtraKey]:
        """In order of `start` (since API 1.2)."""

    @property
    def retention(self) -> Retention:
        """How long its content is worth keeping (since API 1.6)."""


class Hit(NamedTuple):
    """Tokens at the start of a request whose K/V the cache holds already."""

    tokens: int  # a multiple of the block size, always below num_tokens: something is left to compute
    pending: bool = False  # some of it is written only by the step being scheduled
    # Of `tokens`, those that no prefix cache would have given: host memory has them, swapped out (since API 1.6)
    swapped: int = 0


class Allocation(NamedTuple):
    """What `allocate` added to a request's block tables."""

    new_block_ids: tuple[IntArray, ...]  # per KV group; on the first call the hit blocks come first
    valid_until_tokens: int  # tokens the tables can hold: call again before the request grows past this


class KVCacheUsage(NamedTuple):
    """Blocks per pool; cached but unreferenced blocks count as free."""

    num_free_blocks: int
    num_total_blocks: int


NO_BLOCKS = KVCacheUsage(0, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheManagerContext:
    """What a manager's factory is given, in the engine process."""

    config: KVCacheConfig
    num_blocks: int
    group_windows: Sequence[int | None] = (None,)  # per KV group: its sliding window in tokens, or None
    records_events: bool = False  # whether somebody wants `take_events` (since API 1.2)
    # Makes the rule that `config.eviction` names, for so many blocks; None = least recently used (since API 1.6)
    make_eviction: Callable[[int], EvictionRule] | None = None
    # In host memory, for K/V that is swapped out (since API 1.6); a manager that cannot use them raises ConfigError
    num_host_blocks: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheInspection:
    """A manager's state for tests and reports."""

    ref_counts: Mapping[int, int]  # of every usable block id
    cached_hashes: frozenset[bytes]  # keys under which a block can be found
    host: KVCacheUsage = NO_BLOCKS  # free and total blocks in host memory (since API 1.6)


class KVCacheManager(ABC):
    """Called by the scheduler only, in the engine process, from one thread.

    At any moment each block is free or referenced by exactly as many block tables as its reference count says, and
    every request's tables cover its computed tokens. No method raises because blocks are short.

    Every KV group has a block table of its own; all groups draw from one pool of block ids, and one id holds the K/V of
    one group's layers. Layers of a group with a sliding window of W tokens read only the last W positions, the query's
    own included: blocks that no later query can reach may be freed in `commit`, and their table entries become block 0,
    which is never handed out.
    """

    @abstractmethod
    def lookup(self, request: KVRequest) -> Hit:
        """The longest usable prefix of `request` in the cache. Changes nothing, counts nothing."""

    @abstractmethod
    def allocate(
        self, request: KVRequest, num_tokens: int, hit: Hit | None = None, num_lookahead: int = 0
    ) -> Allocation | None:
        """Make the tables of `request` hold `num_tokens` tokens in all, plus `num_lookahead` speculative ones.

        The first call for a request passes the `hit` of a `lookup` made since the last change, and takes its blocks.
        Returns None, having changed nothing, when there are not enough free blocks.
        """

    @abstractmethod
    def commit(self, request: KVRequest, num_computed_tokens: int) -> None:
        """K/V of the first `num_computed_tokens` tokens, all known, is written: full blocks may now be shared."""

    @abstractmethod
    def free(self, request: KVRequest) -> None:
        """Drop every reference of `request`; one that holds nothing is no error."""

    @abstractmethod
    def reset(self) -> bool:
        """Forget the prefix cache. Returns False, having changed nothing, while any block is referenced."""

    @abstractmethod
    def block_ids(self, request: KVRequest) -> tuple[IntArray, ...]:
        """Per KV group, the block table of `request` in order; copies."""

    @property
    @abstractmethod
    def usage(self) -> KVCacheUsage:
        """Free and total blocks, now."""

    @abstractmethod
    def capacity_tokens(self) -> int:
        """Tokens that one request can hold when it has the whole pool to itself."""

    def allocate_next(self, requests: Sequence[KVRequest]) -> tuple[IntArray, ...] | None:
        """One more block, in each group, for each of these different requests, which hold blocks (since API 1.7).

        What `allocate` would give them in this order, at once: most calls are decodes at the end of their last block.
        Returns [len(requests)] block ids per KV group; every table holds as many tokens more as a block has.
        None, with nothing changed: there are too few blocks, or this manager has no such way; then `allocate` is asked.
        """
        return None

    @property
    def needs_commits(self) -> bool:
        """False: `commit` would do nothing, and need not be called; never changes (since API 1.7)."""
        return True

    # Since API 1.2; a manager for an older one has the defaults

    def take_events(self) -> Sequence[KVEvent]:
        """What was stored, removed and cleared since the last call; nothing unless the context asked to record."""
        return ()

    def inspect(self) -> KVCacheInspection:
        """Reference counts and hashes, now; for tests and reports, not for the step loop."""
        raise UnsupportedError(
            f"{type(self).__name__} cannot be inspected: it was written for plugin API 1.1 or older",
            parameter="inspect",
            value=None,
        )

    # Since API 1.6; a manager for an older one has the defaults

    @property
    def prefix_version(self) -> int | None:
        """A number that stands still for as long as `lookup` answers as before; None = nobody knows."""
        return None

    def num_exclusive_blocks(self, request: KVRequest) -> int:
        """Blocks that would be free if `request` gave up its own."""
        return sum(int((table > 0).sum()) for table in self.block_ids(request))

    def num_saved_blocks(self, request: KVRequest, hit: Hit, without: Sequence[KVRequest] = ()) -> int:
        """Blocks by which `hit`, of a `lookup` made since the last change, lowers what `allocate` takes from the free.

        Those that others hold, or that have left a window; not those that nobody holds, which count as free, and not
        what has to be copied back. Blocks that nobody but the requests of `without` holds count as held by nobody.
        """
        return 0

    def prefix_hashes(self, request: KVRequest) -> Sequence[bytes]:
        """Names of the blocks at the start of `request` that a `lookup` may find, whether or not it does now.

        In order, without gaps; equal names = equal content of the block and all before it. Changes nothing that others
        see. Empty where nothing may be found, or the manager gives no names.
        """
        return ()

    def swap_out(self, request: KVRequest, num_computed_tokens: int) -> bool:
        """Copy the K/V of the first `num_computed_tokens` tokens to host memory, before `free` gives its blocks back.

        Steps in flight may still write some of them: the copies are made after those, and wait for `take_transfers`.
        Only whole blocks are copied. From then on a `lookup` of the request finds them, also when it skips the prefix
        cache, and `allocate` with that hit copies them back; host memory is free again once it was admitted, with
        whatever hit, or after `forget_swapped` or `reset`. Returns False, having changed nothing, where there is no
        such memory, too little of it is free, or there is no whole block. Call `forget_swapped` when what was in flight
        turns out to have computed other tokens than the request has now.
        """
        return False

    def forget_swapped(self, request: KVRequest) -> None:  # noqa: B027 - most managers have no such memory
        """Drop what host memory has of `request`, which was swapped out and has ended; nothing there is no error."""

    def take_transfers(self) -> Sequence[HostTransfer]:
        """Copies between device and host that are due since the last call, in order: before the next step runs."""
        return ()
