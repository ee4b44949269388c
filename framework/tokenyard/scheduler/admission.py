"""Admission: which waiting requests enter the batch in a step, and why the others wait."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.interfaces.scheduler import RequestSnapshot, RequestStatus, WaitReason

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tokenyard.clock import Clock
    from tokenyard.config import SchedulerConfig
    from tokenyard.interfaces.kv_cache import KVCacheManager, KVCacheUsage
    from tokenyard.scheduler.counters import Counters
    from tokenyard.scheduler.events import RequestEvents
    from tokenyard.scheduler.policy_calls import PolicyCalls
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.running import RunningBatch
    from tokenyard.scheduler.slots import SlotTable
    from tokenyard.scheduler.step import StepBuilder
    from tokenyard.scheduler.waiting import WaitingQueue


class Admission:
    """The first request that does not fit ends the admission of a step: nobody overtakes it.

    Those that the policy defers are set aside for the step and keep their place. A request is admitted only when the
    blocks of all its known tokens are free, so prefill never stops half-way for lack of them.
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
        policy: PolicyCalls,
        counters: Counters,
        events: RequestEvents,
        clock: Clock,
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
        self._policy = policy
        self._counters = counters
        self._events = events
        self._clock = clock
        self._block_size = block_size
        self._fail = fail  # ends a waiting request with an error, which is counted under a reason
        self.is_paused = False
        self._num_schedules = 0
        self._num_new = 0  # queued since the last schedule
        self._reason: WaitReason | None = None  # of the first request that was not set aside
        self._usage: KVCacheUsage | None = None  # when it lacked blocks
        self._deferred: dict[str, str] = {}  # request id -> the policy's reason, of the last step

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
        self._num_new = 0
        self._deferred.clear()
        self._reason = blocked
        if blocked is not None or not self._waiting or (self.is_paused and not self._waiting.num_started):
            return []
        admitted: list[Request] = []
        while (full := self._full(left)) is None and (request := self._next()) is not None:
            count = self._try(request, left)
            if not isinstance(count, WaitReason):
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
        self._waiting.take_back()
        return admitted

    def wait_reason(self) -> WaitReason | None:
        """Why the first request in line waits."""
        first = self._waiting.peek()
        return None if first is None else self._why(first, is_first=True)[0]

    def num_waiting_by_reason(self) -> dict[str, int]:
        """How many wait for what; those that cannot overtake count with the one that they are behind."""
        left = len(self._waiting)
        counts: dict[str, int] = {}
        for reason, count in (
            (WaitReason.PAUSED, left - self._waiting.num_started if self.is_paused else 0),
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

    def _full(self, left: int) -> WaitReason | None:
        """Why nobody can enter, whoever it is: then the policy is not asked either."""
        if len(self._running) >= self._max_num_seqs:
            return WaitReason.MAX_NUM_SEQS
        return WaitReason.TOKEN_BUDGET if left <= 0 else None

    def _next(self) -> Request | None:
        """The next candidate; those that the policy defers, or that a pause holds back, are set aside."""
        while (request := self._waiting.peek()) is not None:
            if self.is_paused and request.status is RequestStatus.WAITING:
                self._waiting.set_aside()
                continue
            decision = self._policy.admit(request)
            if decision.kind == "accept":
                return request
            if decision.kind == "reject":
                self.reject(request, decision.reason)
            else:
                self._deferred[request.request_id] = str(decision.reason)
                self._waiting.set_aside()
        return None

    def _try(self, request: Request, left: int) -> int | WaitReason:
        """Admit one request; the tokens that it gets in this step, or why it has to wait."""
        if self._running.is_landing(request.request_id):
            # Blocks are held by id: these are of its own earlier stay, with tokens that it does not know yet, or of an
            # ended request that had the same one.
            return WaitReason.BLOCKS_IN_FLIGHT
        hit = self._kv.lookup(request)
        missing = request.num_tokens - hit.tokens
        count = min(missing, left, self._max_chunk) if self._can_chunk else missing
        if count > left:
            return WaitReason.TOKEN_BUDGET
        allocation = self._kv.allocate(request, request.num_tokens, hit)
        if allocation is None:
            self._usage = self._kv.usage
            return WaitReason.BLOCKS_IN_FLIGHT if self._running.has_blocks_in_flight else WaitReason.KV_BLOCKS
        is_resumed = request.status is RequestStatus.PREEMPTED
        self._counters.admit(request, hit.tokens, is_resumed=is_resumed)
        self._waiting.remove(request.request_id)
        self._events.entered_or_ended(request)
        slot = self._running.enter(request)
        self._table.num_computed[slot.index] = hit.tokens
        self._table.service_before[slot.index] -= hit.tokens
        self._table.commit_at[slot.index] = (hit.tokens // self._block_size + 1) * self._block_size
        self._table.valid_until[slot.index] = allocation.valid_until_tokens
        self._steps.add_start(request, slot, is_resumed, hit.tokens, allocation)
        self._steps.add_prefill(slot.index, count)
        return count

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
        if not self._deferred or len(self._waiting) > len(self._deferred) or not self._is_stuck():
            return
        moment = self._policy.wake_at()
        if moment is None or moment <= self._clock.now():
            self._waiting.take_back()
            first = self._waiting.peek()
            if first is not None:
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
        if self.is_paused and request.status is RequestStatus.WAITING:
            return WaitReason.PAUSED, None
        if request.queued_in == self._num_schedules:
            return WaitReason.NEW, None
        if not is_first:
            return WaitReason.BEHIND, None
        if self._reason is WaitReason.KV_BLOCKS and self._usage is not None:
            free, total = self._usage
            return self._reason, f"{request.num_tokens} tokens to hold, {free} of {total} blocks were free"
        return self._reason or WaitReason.NEW, None
