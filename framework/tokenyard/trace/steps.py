"""StepNotes: a SchedulerOutput as a record, in terms of requests."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.engine_outputs import RequestEventKind
from tokenyard.interfaces.policy import PreemptMode
from tokenyard.trace.digests import step_digest, tables_digest
from tokenyard.trace.records import Chunk, Growth, Preempted, Scheduled, Start

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenyard.arrays import BoolArray, LongArray
    from tokenyard.engine_outputs import RequestEvent
    from tokenyard.scheduler_output import RequestStart, SchedulerOutput
    from tokenyard.trace.records import Disagreement, Waits

_NO_SLOTS: LongArray = np.empty(0, dtype=np.intp)
_NO_BLOCKS = ""


class StepNotes:
    """Knows from the steps alone which request has which slot, as a worker does."""

    def __init__(self) -> None:
        self._ids: dict[int, str] = {}  # by slot
        self._decodes = _NO_SLOTS  # of the step before
        self._tables = _NO_BLOCKS
        self._live: set[str] = set()  # that have started and not ended
        self.num_steps = 0

    def ended(self, request_ids: Iterable[str]) -> None:
        """Whose slot is given back because they are done."""
        self._live.difference_update(request_ids)

    def take(
        self,
        at: float,
        output: SchedulerOutput | None,
        events: Sequence[RequestEvent],
        waits: Waits,
        num_free: int,
        shadow: tuple[Disagreement, ...],
    ) -> Scheduled:
        """What one `schedule` decided. `events`: what the scheduler told of it."""
        lost = self._preempted(output, events)
        if output is None:
            return Scheduled(at=at, waits=waits, num_free_blocks=num_free, preempted=lost, shadow=shadow)
        self.num_steps += 1
        starts = (*output.new, *output.resumed)
        for start in starts:
            self._ids[start.slot.index] = start.request_id
            self._live.add(start.request_id)
        is_chunk = self._chunk_rows(output, starts)
        self._tables = tables_digest(self._tables, output, num_free)
        return Scheduled(
            at=at,
            waits=waits,
            num_free_blocks=num_free,
            step=output.step,
            num_tokens=output.total_num_scheduled_tokens,
            new=tuple(map(_start, output.new)),
            resumed=tuple(map(_start, output.resumed)),
            decodes=self._decoding(output.slots[~is_chunk]),
            chunks=self._chunks(output, is_chunk),
            grown=self._grown(output),
            preempted=lost,
            went_on=_went_on(output, events),
            kv=self._tables,
            hash=step_digest(output),
            shadow=shadow,
        )

    def _chunk_rows(self, output: SchedulerOutput, starts: Sequence[RequestStart]) -> BoolArray:
        """[R] which rows do more than decode one token."""
        is_chunk = (output.num_scheduled_tokens != 1) | ~output.samples
        if starts:
            is_chunk |= np.isin(output.slots, [start.slot.index for start in starts])
        return np.asarray(is_chunk, dtype=np.bool_)

    def _decoding(self, slots: LongArray) -> tuple[str, ...] | None:
        """A slot that changed hands has had a chunk in between, so equal slots are equal requests."""
        if np.array_equal(slots, self._decodes):
            return None
        self._decodes = slots
        return tuple(self._ids[slot] for slot in slots.tolist())

    def _chunks(self, output: SchedulerOutput, is_chunk: BoolArray) -> tuple[Chunk, ...]:
        rows = np.flatnonzero(is_chunk).tolist()
        return tuple(
            Chunk(
                self._ids[int(output.slots[row])],
                int(output.num_computed_tokens[row]),
                int(output.num_scheduled_tokens[row]),
            )
            for row in rows
        )

    def _grown(self, output: SchedulerOutput) -> tuple[Growth, ...]:
        return tuple(
            Growth(self._ids[update.slot.index], update.group, update.start, tuple(update.block_ids.tolist()))
            for update in output.block_table_updates
        )

    def _preempted(self, output: SchedulerOutput | None, events: Sequence[RequestEvent]) -> tuple[Preempted, ...]:
        """By the scheduler's events; where it tells none, whose slot was given back without an end."""
        told = [event for event in events if event.kind is RequestEventKind.PREEMPTED]
        lost = [Preempted(event.request_id, event.mode, event.num_tokens, event.reason) for event in told]
        known = {event.request_id for event in told}
        for slot in () if output is None else output.finished:
            request_id = self._ids.get(slot.index)
            if request_id is not None and request_id in self._live and request_id not in known:
                lost.append(Preempted(request_id, None, 0, None))
                known.add(request_id)
        self._live.difference_update(row.id for row in lost if row.mode != PreemptMode.PAUSE.value)
        return tuple(lost)


def _start(start: RequestStart) -> Start:
    return Start(
        start.request_id,
        start.slot.index,
        len(start.token_ids),
        start.num_computed_tokens,
        tuple(tuple(table.tolist()) for table in start.block_ids),
    )


def _went_on(output: SchedulerOutput, events: Sequence[RequestEvent]) -> tuple[str, ...]:
    """A request that resumes with a new start is no paused one."""
    started = {start.request_id for start in output.resumed}
    return tuple(
        event.request_id
        for event in events
        if event.kind is RequestEventKind.RESUMED and event.request_id not in started
    )
