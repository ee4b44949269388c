"""Admission: which waiting requests enter the batch in a step, and why the others wait."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from tokenyard.engine_outputs import AdmittedRequest
from tokenyard.interfaces.scheduler import RequestSnapshot, RequestStatus, WaitReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tokenyard.config import SchedulerConfig
    from tokenyard.interfaces.kv_cache import Allocation, Hit, KVCacheManager, KVCacheUsage
    from tokenyard.scheduler.counters import Counters
    from tokenyard.scheduler.events import RequestEvents
    from tokenyard.scheduler.growth import BlockGrowth
    from tokenyard.scheduler.policy_calls import PolicyCalls
    from tokenyard.scheduler.preemption import Preemptor
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.running import RunningBatch
    from tokenyard.scheduler.slots import SlotTable
    from tokenyard.scheduler.step import StepBuilder
    from tokenyard.scheduler.step_time import StepTime
    from tokenyard.scheduler.waiting import WaitingQueue
    from tokenyard.scheduler_output import SchedulerOutput

_WAITS = (RequestStatus.WAITING, RequestStatus.PREEMPTED)


class Admission:
    """The first request that does not fit ends the admission of a step: nobody overtakes it.

    Those that the policy defers or leaves out are passed over in the step, and keep their place. A request is admitted
    only when the blocks of all its known tokens are free, so prefill never stops half-way for lack of them; blocks of
    paused requests are taken for it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        *,
        table: SlotTable,
        kv_cache_manager: KVCacheManager,
        running: RunningBatch,
        waiting: WaitingQueue,
        steps: StepBuilder,
        growth: BlockGrowth,
        preemptor: Preemptor,
        policy: PolicyCalls,
        counters: Counters,
        events: RequestEvents,
        time: StepTime,
        block_size: int,
        fail: Callable[[Request, str, str], None],
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._can_chunk = config.enable_chunked_prefill
        self._max_chunk = config.long_prefill_token_threshold or config.max_num_batched_tokens
        self._table = table
        self._kv = kv_cache_manager
        self._running = running
        self._waiting = waiting
        self._steps = steps
        self._growth = growth
        self._preemptor = preemptor
        self._policy = policy
        self._counters = counters
        self._events = events
        self._time = time
        self._block_size = block_size
        self._fail = fail  # ends a waiting request with an error, which is counted under a reason
        self._num_schedules = 0
        self._num_new = 0  # queued since the last schedule
        self._reason: WaitReason | None = None  # of the first request that was not passed over
        self._usage: KVCacheUsage | None = None  # when it lacked blocks
        self._deferred: dict[str, str] = {}  # request id -> the policy's reason, of the last step
        self._num_held = 0  # of these: those that the policy left out of its order, or gave no tokens

    @property
    def num_deferred(self) -> int:
        return len(self._deferred)

    def queue(self, request: Request) -> None:
        """A request starts to wait; raises, leaving no trace, when the policy fails."""
        request.queued_in = self._num_schedules
        self._waiting.push(request, self._policy.waiting_key(request))
        self._num_new += 1

    def reject(self, request: Request, reason: str | None) -> None:
        """The policy refuses a waiting request."""
        self._fail(request, f"rejected by scheduling policy {self._policy.name}: {reason}", "policy")

    def admit(self, left: int, blocked: WaitReason | None) -> list[Request]:
        """Fill what is left of the step's budget; `blocked` says why nobody may enter in this step."""
        self._num_schedules += 1
        self._num_new = self._num_held = 0
        self._deferred.clear()
        self._reason = blocked
        if blocked is not None or not self._waiting or (self._waiting.is_paused and not self._waiting.num_started):
            return []
        admitted: list[Request] = []
        most = self._policy.max_running(self._max_num_seqs)
        candidates = self._candidates()
        while (full := self._full(most, left)) is None and (request := next(candidates, None)) is not None:
            count = self._try(request, left)
            if count == 0:
                self._hold(request, "the policy gave it no tokens")
            elif not isinstance(count, WaitReason):
                admitted.append(request)
                left -= count
            elif self._is_stuck():
                self._fail(request, self._stuck_message(request), "capacity")
            else:
                self._reason = count
                self._events.released(request)
                break
        self._reason = self._reason or full
        self._events.deferred(self._deferred)
        self._end_deferral()
        return admitted

    def wait_reason(self) -> WaitReason | None:
        """Why the first request in line waits."""
        first = self._waiting.at(0)
        return None if first is None else self._why(first, is_first=True)[0]

    def num_waiting_by_reason(self) -> dict[str, int]:
        """How many wait for what; those that cannot overtake count with the one that they are behind."""
        left = len(self._waiting)
        counts: dict[str, int] = {}
        for reason, count in (
            (WaitReason.PAUSED, left - self._waiting.num_started if self._waiting.is_paused else 0),
            (WaitReason.DEFERRED, len(self._deferred)),
            (WaitReason.NEW, left if self._reason is None else self._num_new),
            (self._reason or WaitReason.NEW, left),
        ):
            if count := min(count, left):
                counts[reason.value] = count
                left -= count
        return counts

    def explain(self, limit: int | None) -> Iterator[RequestSnapshot]:
        """The waiting requests in order, each with its reason."""
        is_first = True
        for number, request in enumerate(self._waiting):
            if limit is not None and number >= limit:
                return
            reason, detail = self._why(request, is_first=is_first)
            is_first &= reason is WaitReason.DEFERRED
            yield request.snapshot(reason, detail)

    def _full(self, most: int, left: int) -> WaitReason | None:
        """Why nobody can enter, whoever it is: then the policy is not asked either."""
        if self._running.num_active >= most:
            return WaitReason.MAX_NUM_SEQS
        return WaitReason.TOKEN_BUDGET if left <= 0 else None

    def _candidates(self) -> Iterator[Request]:
        """Those who may enter, in order; one that waits on is passed over. The line may change between two of them."""
        for request in self._ordered() if self._policy.orders_waiting else self._in_line():
            if self._waiting.is_paused and request.status is RequestStatus.WAITING:
                continue
            decision = self._policy.admit(request)
            if decision.kind == "accept":
                yield request
            elif decision.kind == "reject":
                self.reject(request, decision.reason)
            else:
                self._deferred[request.request_id] = str(decision.reason)

    def _in_line(self) -> Iterator[Request]:
        passed: set[str] = set()
        displaced = self._preemptor.displaced  # they have just been told to make room
        position = 0
        while (request := self._waiting.at(position)) is not None:
            if request.request_id not in passed and request.request_id not in displaced:
                passed.add(request.request_id)
                yield request
            position += request.status in _WAITS

    def _ordered(self) -> Iterator[Request]:
        """By the policy, a window at a time: a window of which all were deferred does not hide those behind it."""
        displaced = self._preemptor.displaced
        for window in self._windows():
            order = self._policy.waiting_order(window)
            yield from (request for request in order if request.request_id not in displaced)
            if len(order) < len(window):
                named = {request.request_id for request in order}
                for request in window:
                    if request.request_id not in named and request.status in _WAITS:
                        self._hold(request, "the policy left it out of its order")

    def _windows(self) -> Iterator[list[Request]]:
        """The line in parts; whoever has left it when the next part is asked for is not counted."""
        start, limit = 0, self._policy.waiting_window
        passed: set[str] = set()
        while window := (
            self._waiting.in_turn(limit, passed) if self._policy.window_by_client else self._waiting.first(limit, start)
        ):
            yield window
            still = [request.request_id for request in window if request.status in _WAITS]
            start += len(still)
            passed.update(still)

    def _hold(self, request: Request, why: str) -> None:
        self._deferred[request.request_id] = why
        self._num_held += 1

    def _try(self, request: Request, left: int) -> int | WaitReason:
        """Admit one request; the tokens that it gets in this step, 0 = the policy gives none, or why it has to wait."""
        if self._running.is_landing(request.request_id):
            # Blocks are held by id: these are of its own earlier stay, with tokens that it does not know yet, or of an
            # ended request that had the same one.
            return WaitReason.BLOCKS_IN_FLIGHT
        hit = self._kv.lookup(request)
        missing = request.num_tokens - hit.tokens
        count = min(missing, left, self._max_chunk) if self._can_chunk else missing
        if count > left:
            return WaitReason.TOKEN_BUDGET
        if self._can_chunk and (count := self._policy.chunk_size(request, count)) == 0:
            return 0
        allocation = self._kv.allocate(request, request.num_tokens, hit)
        if allocation is None and self._growth.make_room(request):
            hit = self._kv.lookup(request)
            missing = request.num_tokens - hit.tokens
            count = min(count, missing) if self._can_chunk else missing
            allocation = self._kv.allocate(request, request.num_tokens, hit)
        if allocation is None:
            self._usage = self._kv.usage
            return WaitReason.BLOCKS_IN_FLIGHT if self._running.has_blocks_in_flight else WaitReason.KV_BLOCKS
        self._enter(request, hit, allocation)
        self._steps.add_prefill(cast("int", request.slot), count)
        return count

    def _enter(self, request: Request, hit: Hit, allocation: Allocation) -> None:
        is_resumed = request.status is RequestStatus.PREEMPTED
        self._counters.admit(request, hit.tokens - hit.swapped, is_resumed=is_resumed)
        self._waiting.remove(request.request_id)
        self._events.entered_or_ended(request)
        slot = self._running.enter(request)
        self._table.num_computed[slot.index] = hit.tokens
        self._table.service_before[slot.index] -= hit.tokens
        self._table.commit_at[slot.index] = (hit.tokens // self._block_size + 1) * self._block_size
        self._table.valid_until[slot.index] = allocation.valid_until_tokens
        self._steps.add_start(request, slot, is_resumed, hit.tokens, allocation)

    def _is_stuck(self) -> bool:
        """Nothing runs or is in flight, so waiting longer changes nothing."""
        return not len(self._running) and not self._running.has_blocks_in_flight

    def _stuck_message(self, request: Request) -> str:
        free, total = self._kv.usage
        return (
            f"the request can never run: {request.num_tokens} tokens do not fit although nothing else runs "
            f"({free} of {total} blocks of {self._block_size} tokens are free)"
        )

    def _end_deferral(self) -> None:
        """A policy that defers everybody while nothing runs, and names no time, would stop the engine for good."""
        if not self._deferred or self._num_held or len(self._waiting) > len(self._deferred) or not self._is_stuck():
            return
        moment = self._policy.wake_at()
        if moment is not None and moment > self._time.now():
            return
        if (first := self._waiting.at(0)) is not None:
            reason = self._deferred.pop(first.request_id)
            self._fail(
                first,
                f"scheduling policy {self._policy.name} deferred the request ({reason}) although nothing runs, and "
                "its wake_at names no later time to ask again",
                "deferred",
            )

    def _why(self, request: Request, *, is_first: bool) -> tuple[WaitReason, str | None]:
        if request.request_id in self._deferred:
            return WaitReason.DEFERRED, self._deferred[request.request_id]
        if self._waiting.is_paused and request.status is RequestStatus.WAITING:
            return WaitReason.PAUSED, None
        if request.queued_in == self._num_schedules:
            return WaitReason.NEW, None
        if not is_first:
            return WaitReason.BEHIND, None
        if self._reason is WaitReason.KV_BLOCKS and self._usage is not None:
            free, total = self._usage
            return self._reason, f"{request.num_tokens} tokens to hold, {free} of {total} blocks were free"
        return self._reason or WaitReason.NEW, None


def newly_admitted(admitted: Sequence[Request], output: SchedulerOutput) -> list[AdmittedRequest]:
    """Those who entered in this step for the first time, for front ends."""
    cached = {start.request_id: start.num_computed_tokens for start in output.new}
    return [
        AdmittedRequest(
            request_id=request.request_id,
            num_cached_tokens=cached[request.request_id],
            scheduled_at=output.scheduled_at,
            client_id=request.client_id,
        )
        for request in admitted
        if request.request_id in cached
    ]
