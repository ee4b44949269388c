"""The read-only view of the scheduler that a policy gets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

import numpy as np

from tokenyard.errors import PluginError
from tokenyard.scheduler.block_needs import num_blocks_needed
from tokenyard.scheduler.columns import RequestFacts, RunningColumns
from tokenyard.scheduler.step_latency import no_latency_model

if TYPE_CHECKING:
    from tokenyard.interfaces.columns import RequestColumns
    from tokenyard.interfaces.kv_cache import KVCacheManager, KVRequest
    from tokenyard.interfaces.latency import StepLatency
    from tokenyard.interfaces.policy import RequestView
    from tokenyard.interfaces.predictor import OutputLengthPredictor
    from tokenyard.scheduler.counters import Counters
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.running import RunningBatch
    from tokenyard.scheduler.slots import SlotTable
    from tokenyard.scheduler.step_time import StepTime
    from tokenyard.scheduler.waiting import WaitingQueue

_MOST_HITS = 10_000  # look-ups that are remembered


class PolicyView:
    """Satisfies `tokenyard.interfaces.SchedulerView`; reads through to the scheduler's own collections."""

    def __init__(
        self,
        *,
        time: StepTime,
        table: SlotTable,
        kv_cache_manager: KVCacheManager,
        waiting: WaitingQueue,
        running: RunningBatch,
        counters: Counters,
        block_size: int,
        seed: int,
        predictor: OutputLengthPredictor | None,
        latency: StepLatency | None,
    ) -> None:
        self._time = time
        self._table = table
        self._facts = RequestFacts(table)
        self._kv = kv_cache_manager
        self._waiting = waiting
        self._running = running
        self._block_size = block_size
        self._counters = counters
        self._predictor = predictor
        self._latency = latency
        self._rng = Random(seed)  # noqa: S311 - reproducible choices, no secrets
        # By request id: whose it was, its known tokens then, and the hit; of one cache state
        self._hits: dict[str, tuple[Request, int, int]] = {}
        self._hits_version: int | None = None

    @property
    def now(self) -> float:
        return self._time.now()

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
        return tuple(cast("dict[str, RequestView]", self._running.requests).values())

    @property
    def running_columns(self) -> RequestColumns:
        return RunningColumns(self._table, self._running, self._facts)

    @property
    def prefills(self) -> Sequence[RequestView]:
        return cast("list[RequestView]", self._running.prefills())

    @property
    def num_waiting_by_client(self) -> Mapping[str | None, int]:
        return MappingProxyType(self._waiting.num_by_client)

    def waiting(self, limit: int) -> Sequence[RequestView]:
        line = self._waiting
        return cast("list[RequestView]", line.started(limit) if line.is_paused else line.first(limit))

    @property
    def token_clock(self) -> int:
        return self._counters.num_computed_tokens

    @property
    def predictor(self) -> OutputLengthPredictor:
        if self._predictor is None:
            raise PluginError("there is no output-length predictor here; set scheduler.predictor")
        return self._predictor

    @property
    def latency(self) -> StepLatency:
        if self._latency is None:
            raise no_latency_model()
        return self._latency

    def num_blocks(self, request: RequestView) -> int:
        # An entry whose block has left the window is 0.
        return sum(int(np.count_nonzero(table)) for table in self._kv.block_ids(cast("KVRequest", request)))

    def num_exclusive_blocks(self, request: RequestView) -> int:
        return self._kv.num_exclusive_blocks(cast("KVRequest", request))

    def num_blocks_needed(self, request: RequestView, without: Sequence[RequestView] = ()) -> int:
        others = cast("Sequence[KVRequest]", without)
        return num_blocks_needed(self._kv, cast("KVRequest", request), self._block_size, others)

    def prefix_hashes(self, request: RequestView) -> Sequence[bytes]:
        return self._kv.prefix_hashes(cast("KVRequest", request))

    def hit_tokens(self, request: RequestView) -> int:
        # The scheduler hands out its own records, which satisfy both protocols.
        record = cast("Request", request)
        version = self._kv.prefix_version
        if version is None:
            return self._kv.lookup(record).tokens
        if version != self._hits_version or len(self._hits) > _MOST_HITS:
            self._hits.clear()
            self._hits_version = version
        num_tokens = record.num_tokens
        found = self._hits.get(record.request_id)
        if found is None or found[0] is not record or found[1] != num_tokens:
            found = self._hits[record.request_id] = (record, num_tokens, self._kv.lookup(record).tokens)
        return found[2]
