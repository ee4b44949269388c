"""KVCacheManager: who holds which block of the K/V cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import IntArray
    from tokenyard.config import KVCacheConfig


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


class Hit(NamedTuple):
    """Tokens at the start of a request whose K/V the cache holds already."""

    tokens: int  # a multiple of the block size, always below num_tokens: something is left to compute
    pending: bool = False  # some of it is written only by the step being scheduled


class Allocation(NamedTuple):
    """What `allocate` added to a request's block tables."""

    new_block_ids: tuple[IntArray, ...]  # per KV group; on the first call the hit blocks come first
    valid_until_tokens: int  # tokens the tables can hold: call again before the request grows past this


class KVCacheUsage(NamedTuple):
    """Blocks per pool; cached but unreferenced blocks count as free."""

    num_free_blocks: int
    num_total_blocks: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheManagerContext:
    """What a manager's factory is given, in the engine process."""

    config: KVCacheConfig
    num_blocks: int
    group_windows: Sequence[int | None] = (None,)  # per KV group: its sliding window in tokens, or None


class KVCacheManager(ABC):
    """Called by the scheduler only, in the engine process, from one thread.

    At any moment each block is free or referenced by exactly as many block tables as its reference count says, and
    every request's tables cover its computed tokens. No method raises because blocks are short.
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
