"""The read-only view of the scheduler that a policy gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from random import Random
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from tokenyard.clock import Clock
    from tokenyard.interfaces.kv_cache import KVCacheManager, KVRequest
    from tokenyard.interfaces.policy import RequestView
    from tokenyard.scheduler.waiting import WaitingQueue


class PolicyView:
    """Satisfies `tokenyard.interfaces.SchedulerView`; reads through to the scheduler's own collections."""

    def __init__(
        self,
        *,
        clock: Clock,
        kv_cache_manager: KVCacheManager,
        waiting: WaitingQueue,
        running: Mapping[str, RequestView],
        block_size: int,
        seed: int,
    ) -> None:
        self._clock = clock
        self._kv = kv_cache_manager
        self._waiting = waiting
        self._running = running
        self._block_size = block_size
        self._rng = Random(seed)  # noqa: S311 - reproducible choices, no secrets

    @property
    def now(self) -> float:
        return self._clock.now()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_free_blocks(self) -> int:
        return self._kv.usage.num_free_blocks

    @property
    def num_total_blocks(self) -> int:
        return self._kv.usage.num_total_blocks

    @property
    def block_size(self) -> int:
        return self._block_size

    @property
    def rng(self) -> Random:
        return self._rng

    @property
    def running(self) -> Sequence[RequestView]:
        return tuple(self._running.values())

    def waiting(self, limit: int) -> Sequence[RequestView]:
        return tuple(islice(self._waiting, limit))

    def num_blocks(self, request: RequestView) -> int:
        return sum(len(table) for table in self._kv.block_ids(cast("KVRequest", request)))

    def hit_tokens(self, request: RequestView) -> int:
        # The scheduler hands out its own records, which satisfy both protocols.
        return self._kv.lookup(cast("KVRequest", request)).tokens
