"""RunningBatch: the requests that hold a slot, and those whose last step is still in flight."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenyard.interfaces.scheduler import RequestStatus
from tokenyard.scheduler.step import NO_SLOTS, StepBuilder

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import BoolArray, LongArray
    from tokenyard.interfaces.kv_cache import KVCacheManager
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.slots import SlotTable
    from tokenyard.scheduler_output import SchedulerOutput, Slot


class Landed(NamedTuple):
    """Whose rows a step has brought back. R = rows."""

    alive: BoolArray | None  # [R] which rows' requests are still in the batch; None = all
    preempted: Sequence[tuple[int, Request]]  # rows of requests that wait again, and may have got a token


ALL_ALIVE = Landed(None, ())


class RunningBatch:
    """A request that leaves gives back its blocks and slot at once, unless a step in flight still names them.

    Such a step writes to those blocks: nobody else gets them, nor the slot, before it has landed. A paused request
    keeps both, and counts for no place in the batch.
    """

    def __init__(self, table: SlotTable, kv_cache_manager: KVCacheManager, steps: StepBuilder) -> None:
        self._table = table
        self._kv = kv_cache_manager
        self._steps = steps
        self.requests: dict[str, Request] = {}  # in admission order
        self.paused: dict[str, Request] = {}  # those of them that have lost their turn, in the order in which they did
        self._slots = NO_SLOTS  # the same; may name slots that were left since
        self._has_left = False
        self._entered: list[int] = []
        self._landing: dict[int, Request] = {}  # by slot: left while steps of theirs are in flight
        self._landing_ids: set[str] = set()
        self._dropped: set[int] = set()  # slots of those whose steps in flight are of no use

    def __len__(self) -> int:
        return len(self.requests)

    @property
    def num_active(self) -> int:
        """Requests that hold a place in the batch."""
        return len(self.requests) - len(self.paused)

    @property
    def has_blocks_in_flight(self) -> bool:
        """Whether blocks will be free once steps in flight have landed."""
        return bool(self._landing)

    def is_landing(self, request_id: str) -> bool:
        """Whether a request of this id has left, and a step of its is still in flight."""
        return request_id in self._landing_ids

    def slots(self) -> LongArray:
        """[R] in admission order, read-only; another array whenever somebody has entered or left."""
        if self._has_left:
            self._slots = self._slots[self._table.is_held[self._slots]]
            self._slots.flags.writeable = False
            self._has_left = False
        if self._entered:
            self._slots = np.concatenate((self._slots, np.array(self._entered, dtype=np.intp)))
            self._slots.flags.writeable = False
            self._entered.clear()
        return self._slots

    def pause(self, request: Request) -> None:
        """It keeps its slot and blocks, and does not run until `go_on`."""
        self.paused[request.request_id] = request
        request.is_paused = True

    def go_on(self, request: Request) -> None:
        """Undo `pause`."""
        del self.paused[request.request_id]
        request.is_paused = False

    def active_slots(self) -> LongArray:
        """[R] of those that are not paused, in admission order."""
        if not self.paused:
            return self.slots()
        return np.array([request.slot for request in self.requests.values() if not request.is_paused], dtype=np.intp)

    def paused_slots(self) -> tuple[Slot, ...]:
        """Of those that are paused."""
        slots = (request.slot for request in self.paused.values())
        return tuple(self._table.names[slot] for slot in slots if slot is not None) if self.paused else ()

    def prefills(self) -> list[Request]:
        """Those that lack the K/V of more than their last token, by what has landed, in admission order."""
        slots, table = self.slots(), self._table
        computed = table.num_computed[slots] - table.tokens_in_flight[slots]
        chosen = slots[table.num_tokens[slots] - computed > 1]
        return [request for slot in chosen.tolist() if (request := table.requests[slot]) is not None]

    def enter(self, request: Request) -> Slot:
        """Give a request a slot; it is the last in order."""
        if self._has_left:
            self.slots()  # forgets the slots that were left: one of them may be given away now
        slot = self._table.acquire(request)
        self.requests[request.request_id] = request
        self._entered.append(slot.index)
        return slot

    def leave(self, request: Request, status: RequestStatus, *, drops_steps: bool = False) -> None:
        """Take a request out; its blocks and slot are free as soon as its steps in flight have landed.

        A preempted request still gets the tokens of those steps, unless it drops them.
        """
        slot = request.slot
        if slot is None:
            raise RuntimeError(f"request {request.request_id} runs without a slot")
        del self.requests[request.request_id]
        if request.is_paused:
            self.go_on(request)
        request.leave(status)
        self._steps.add_ended(slot)
        self._table.detach(slot)
        if slot in self._entered:
            self._entered.remove(slot)
        else:
            self._has_left = True
        if self._table.tokens_in_flight[slot]:
            self._landing[slot] = request
            self._landing_ids.add(request.request_id)
            if drops_steps:
                self._dropped.add(slot)
        else:
            self._kv.free(request)
            self._table.release(slot)

    def drop_steps(self, slot: int) -> None:
        """What is still in flight for a request that has left this slot is of no use."""
        if slot in self._landing:
            self._dropped.add(slot)

    def land(self, output: SchedulerOutput) -> Landed:
        """A step has come back."""
        table, slots = self._table, output.slots
        self._steps.land(output)
        if not self._landing:
            return ALL_ALIVE
        # A slot is not given away before its last step in flight has landed, so one that is held is held by the
        # request that the step names.
        alive = table.is_held[slots]
        preempted = []
        for row in np.flatnonzero(~alive).tolist():
            slot = int(slots[row])
            request = self._landing[slot]
            if request.status is RequestStatus.PREEMPTED and slot not in self._dropped:
                preempted.append((row, request))
            if not table.tokens_in_flight[slot]:
                del self._landing[slot]
                self._landing_ids.discard(request.request_id)
                self._dropped.discard(slot)
                self._kv.free(request)
                table.release(slot)
        return Landed(alive, preempted)
