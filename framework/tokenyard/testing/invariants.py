"""What must hold after every step: of blocks, of requests, of progress. Each rule has an id."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.errors import UnsupportedError
from tokenyard.interfaces.scheduler import RequestStatus, WaitReason
from tokenyard.scheduler.policy_calls import overridden
from tokenyard.testing.errors import ContractViolation
from tokenyard.testing.memory import NULL_BLOCK

if TYPE_CHECKING:
    from tokenyard.engine_outputs import EngineCoreOutputs, SchedulerStats
    from tokenyard.interfaces.kv_cache import KVCacheInspection, KVCacheManager, KVRequest
    from tokenyard.interfaces.scheduler import RequestSnapshot, Scheduler, SchedulerSnapshot
    from tokenyard.launch.assemble import EngineParts
    from tokenyard.testing.ledger import Ledger
    from tokenyard.testing.records import RequestRecord
    from tokenyard.testing.worker_side import WorkerSide, WorkerStep


def _value(reason: WaitReason | None) -> str | None:
    return None if reason is None else reason.value


def snapshot_of(scheduler: Scheduler) -> SchedulerSnapshot | None:
    """None for a scheduler that was written for API 1.1."""
    try:
        return scheduler.snapshot()
    except UnsupportedError:
        return None


def inspection_of(manager: KVCacheManager) -> KVCacheInspection | None:
    """None for a manager that was written for API 1.1."""
    try:
        return manager.inspect()
    except UnsupportedError:
        return None


def check_blocks(manager: KVCacheManager, holders: Iterable[KVRequest], num_blocks: int) -> None:
    """`holders` are the requests that may hold blocks: the live ones, and those that a step in flight still names."""
    listed: dict[int, int] = {}
    for record in holders:
        for table in manager.block_ids(record):
            for block_id in table.tolist():
                listed[block_id] = listed.get(block_id, 0) + 1
    listed.pop(NULL_BLOCK, None)
    usage, inspection = manager.usage, inspection_of(manager)
    if usage.num_total_blocks != num_blocks:
        raise ContractViolation(
            "kv.conservation", f"the pool has {usage.num_total_blocks} blocks instead of {num_blocks}"
        )
    if usage.num_free_blocks + len(listed) != num_blocks:
        raise ContractViolation(
            "kv.conservation",
            f"{usage.num_free_blocks} free and {len(listed)} in block tables do not make {num_blocks}",
        )
    if inspection is not None:
        _check_ref_counts(inspection.ref_counts, listed, num_blocks)


def _check_ref_counts(ref_counts: Mapping[int, int], listed: Mapping[int, int], num_blocks: int) -> None:
    if NULL_BLOCK in ref_counts or len(ref_counts) != num_blocks:
        raise ContractViolation(
            "kv.conservation", f"inspect() counts {len(ref_counts)} blocks instead of the {num_blocks} usable ones"
        )
    held = {block_id: count for block_id, count in ref_counts.items() if count}
    if held != listed:
        block_id = min(block for block in held.keys() | listed.keys() if held.get(block) != listed.get(block))
        raise ContractViolation(
            "kv.ref_counts",
            f"block {block_id} has reference count {held.get(block_id, 0)} and is in {listed.get(block_id, 0)} tables",
        )


def check_tables(manager: KVCacheManager, worker: WorkerSide, live: Mapping[str, RequestRecord]) -> None:
    """A request in the batch has blocks for all its computed tokens, and the worker was told which.

    The manager may know more blocks than the worker, until the next step, and fewer of those behind a window.
    """
    for held in worker.held.values():
        record = live.get(held.request_id)
        if record is None or record.status is not RequestStatus.RUNNING:  # the worker learns of it in the next step
            continue
        for group, table in enumerate(manager.block_ids(record)):
            own, told = table.tolist(), held.tables[group]
            if len(own) * worker.limits.block_size < held.num_computed:
                raise ContractViolation(
                    "table.covers_computed",
                    f"'{held.request_id}' has {held.num_computed} tokens computed, its table of group {group} is {own}",
                )
            if any(mine not in (NULL_BLOCK, theirs) for mine, theirs in zip(own, told, strict=False)):
                raise ContractViolation(
                    "table.as_told", f"'{held.request_id}' has blocks {own} (group {group}), the worker was told {told}"
                )


def check_requests(snapshot: SchedulerSnapshot, records: Mapping[str, RequestRecord]) -> None:
    """The scheduler's requests are those that were added and have not ended, with the tokens that were given out."""
    seen: set[str] = set()
    for status, rows in (("running", snapshot.running), ("waiting", snapshot.waiting)):
        for row in rows:
            record = records.get(row.request_id)
            if record is None or record.is_finished:
                raise ContractViolation(
                    "request.only_live", f"'{row.request_id}' is {status} but has ended, or never was"
                )
            if row.request_id in seen:
                raise ContractViolation("request.listed_once", f"'{row.request_id}' is in the snapshot twice")
            seen.add(row.request_id)
            _check_row(row, record, is_running=status == "running")


def _check_row(row: RequestSnapshot, record: RequestRecord, *, is_running: bool) -> None:
    if is_running != (row.status is RequestStatus.RUNNING):
        raise ContractViolation("request.status", f"{record} is {row.status.value} in the wrong list")
    if is_running != (row.wait_reason is None):
        raise ContractViolation(
            "request.wait_reason", f"{record} is {row.status.value} with reason {_value(row.wait_reason)}"
        )
    if row.num_output_tokens != len(record.output_token_ids):
        raise ContractViolation(
            "request.tokens_counted",
            f"{record} was given {len(record.output_token_ids)} tokens, the scheduler says {row.num_output_tokens}",
        )
    if row.num_computed_tokens > record.num_tokens:
        raise ContractViolation(
            "request.tokens_counted", f"{record} has {row.num_computed_tokens} computed of {record.num_tokens} tokens"
        )


def check_none_lost(snapshot: SchedulerSnapshot, records: Iterable[RequestRecord]) -> None:
    """After a step: whoever has not ended runs or waits."""
    there = {row.request_id for row in (*snapshot.running, *snapshot.waiting)}
    for record in records:
        if record.request_id not in there:
            raise ContractViolation("request.lost", f"{record} neither runs nor waits, and its end was never reported")


def check_stats(stats: SchedulerStats, snapshot: SchedulerSnapshot, manager: KVCacheManager) -> None:
    """The gauges say what is there."""
    told = (stats.num_running, stats.num_waiting, stats.num_free_blocks, stats.num_total_blocks)
    there = (len(snapshot.running), len(snapshot.waiting), *manager.usage)
    if told != there:
        raise ContractViolation(
            "stats.gauges", f"stats say {told}, there are {there} (running, waiting, free and total blocks)"
        )
    if min(stats.num_generation_tokens, stats.prefix_cache_hits, stats.num_prompt_tokens) < 0:
        raise ContractViolation("stats.counters", f"a counter is negative: {stats}")


def split_tokens(outputs: EngineCoreOutputs) -> dict[str, list[int]]:
    """Request id -> its new tokens."""
    ends = np.cumsum(outputs.num_tokens).tolist()
    if len(outputs.request_ids) != len(ends) or (ends and ends[-1] != len(outputs.token_ids)):
        raise ContractViolation("outputs.ragged", f"{len(outputs.request_ids)} ids, {outputs.num_tokens} tokens each")
    pieces = np.split(outputs.token_ids, ends[:-1])
    return {name: piece.tolist() for name, piece in zip(outputs.request_ids, pieces, strict=bool(ends))}


def check_delivered(
    landed: Sequence[WorkerStep], delivered: Mapping[str, list[int]], live: Mapping[str, RequestRecord]
) -> None:
    """What was given out is what was sampled, cut where the request ended; only who left the batch gets nothing."""
    sampled: dict[str, list[int]] = {}
    may_get_none: set[str] = set()
    for row in (row for step in landed for row in step.rows):
        name = row.held.request_id
        if row.held.has_ended:
            continue  # the id may be another request's by now
        sampled.setdefault(name, []).extend(row.sampled)
        if row.held.is_gone or name not in live or live[name].status is RequestStatus.PREEMPTED:
            may_get_none.add(name)
    for name in delivered.keys() | sampled.keys():
        given, made = delivered.get(name, []), sampled.get(name, [])
        is_cut = name not in live and given == made[: len(given)]
        if given != made and not is_cut and not (not given and name in may_get_none):
            raise ContractViolation("request.tokens_as_sampled", f"'{name}' sampled {made} and was given {given}")


class StateJudge:
    """Looks at requests, blocks, slots and counters between two calls."""

    def __init__(self, parts: EngineParts, worker: WorkerSide, ledger: Ledger, num_blocks: int) -> None:
        self._core = parts.core
        self._scheduler = parts.scheduler
        self._manager = parts.kv_cache_manager
        self._worker = worker
        self._may_rest = parts.policy is not None and "wake_at" in overridden(parts.policy)
        self._ledger = ledger
        self._num_blocks = num_blocks

    def take_snapshot(self) -> SchedulerSnapshot | None:
        """Bring the records up to date; costs as much as there are requests."""
        snapshot = snapshot_of(self._scheduler)
        if snapshot is not None:
            self._ledger.take_snapshot(snapshot)
        return snapshot

    def check(self, *, is_after_step: bool = False) -> None:
        """Bring the records up to date, and raise ContractViolation when something does not fit the rest."""
        snapshot, live = self.take_snapshot(), self._ledger.live
        check_blocks(self._manager, self._ledger.holders(self._worker.ids_in_flight), self._num_blocks)
        check_tables(self._manager, self._worker, live)
        if snapshot is not None:
            check_requests(snapshot, self._ledger.records)
            check_stats(self._core.stats(), snapshot, self._manager)
        if live and not self._core.has_requests():
            raise ContractViolation("engine.has_requests", f"it says none, but {list(live)} have not ended")
        if is_after_step and snapshot is not None:
            check_none_lost(snapshot, live.values())

    def check_not_stalled(self) -> None:
        """Nothing ran although nothing was in flight: then all requests wait for a reason, or the policy for a time."""
        live = self._ledger.live
        if self._may_rest and self._core.wake_at() is not None:
            return
        has_reasons = snapshot_of(self._scheduler) is not None
        if any(row.wait_reason not in ("deferred", "paused") for row in live.values()) and (
            has_reasons or self._core.wake_at() is None
        ):
            stuck = {name: (row.status.value, _value(row.wait_reason)) for name, row in live.items()}
            raise ContractViolation("progress.stalled", f"nothing ran although nobody has a reason to wait: {stuck}")

    def check_idle(self) -> None:
        """Nothing is left behind."""
        inspection, usage = inspection_of(self._manager), self._manager.usage
        counts, host = ({}, (0, 0)) if inspection is None else (inspection.ref_counts, inspection.host)
        left = {
            "live requests": list(self._ledger.live),
            "steps in flight": len(self._worker.in_flight),
            "has_requests": self._core.has_requests(),
            "blocks held": usage.num_total_blocks - usage.num_free_blocks,
            "references": {block: count for block, count in counts.items() if count},
            "host blocks held": host[1] - host[0],
        }
        if any(left.values()):
            raise ContractViolation("idle.nothing_left", f"left behind: {left}")
