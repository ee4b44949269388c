"""EvictionRule: which free block of a K/V cache is used next, and so whose cached content is lost."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

COMPONENT_KIND = "eviction"
"""`ComponentDescriptor.component_kind` of eviction rules, chosen by `kv_cache.eviction=NAME`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvictionContext:
    """What an eviction rule's factory is given."""

    num_blocks: int


class EvictionRule(ABC):
    """The free ones of the blocks 1 .. num_blocks; a new rule has them all, without content, in the order of their ids.

    A block pool calls it (since API 1.6). A free block keeps its content until `pop` hands it out; `remove` takes it
    out for that content. Nothing but the calls decides: no clock, no random numbers without a seed of its own.
    `tokenyard.kv_cache` has `EmptyFirst` and `RankedEviction` to derive from.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __contains__(self, block_id: object) -> bool: ...

    @abstractmethod
    def pop(self, count: int) -> list[int]:
        """Take the `count` blocks that go first; raises RuntimeError, having changed nothing, when fewer are free.

        Blocks without content go before all others: nothing is lost with them.
        """

    @abstractmethod
    def remove(self, block_id: int) -> None:
        """Take one free block, with content, out of its place: it is hit."""

    @abstractmethod
    def append(self, block_ids: Iterable[int]) -> None:
        """These are free from now on; of equals, the first goes first."""

    def on_written(self, block_ids: Sequence[int]) -> None:  # noqa: B027 - a rule may not care
        """The content of these blocks became final, all at once; they are in the order of their tokens.

        None of them is free. What the rule knew of an earlier content of theirs is void, whether `pop` handed them out
        since or not.
        """

    def on_hit(self, block_ids: Sequence[int]) -> None:  # noqa: B027 - the same
        """The content of these blocks serves one more request; `remove` was called for those that were free."""

    def on_cleared(self) -> None:  # noqa: B027 - the same
        """No block has content any more."""
