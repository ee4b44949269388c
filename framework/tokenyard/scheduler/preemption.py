"""Preemption: who gives up its place, and what becomes of its K/V."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.interfaces.policy import Preemption, PreemptMode
from tokenyard.interfaces.scheduler import RequestStatus

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.interfaces.kv_cache import KVCacheManager
    from tokenyard.scheduler.events import RequestEvents
    from tokenyard.scheduler.policy_calls import PolicyCalls
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.running import RunningBatch
    from tokenyard.scheduler.waiting import WaitingQueue


class Preemptor:
    """Takes places and blocks away. Whoever loses its blocks waits again, and keeps its tokens."""

    def __init__(
        self,
        mode: PreemptMode,
        *,
        kv_cache_manager: KVCacheManager,
        running: RunningBatch,
        waiting: WaitingQueue,
        policy: PolicyCalls,
        events: RequestEvents,
    ) -> None:
        self._mode = mode
        self._kv = kv_cache_manager
        self._running = running
        self._waiting = waiting
        self._policy = policy
        self._events = events
        self.num_preemptions = 0
        self.displaced: set[str] = set()  # ids of those that made room in the current step: they do not enter in it

    def begin_step(self) -> None:
        """A step begins."""
        if self.displaced:
            self.displaced = set()

    def take_blocks(self, candidates: Sequence[Request], reason: str) -> Request:
        """One of these, by the policy's choice, gives its blocks back."""
        victim = self._policy.victim(candidates, 1)
        mode = self._policy.preempt_mode(victim, self._mode)
        self._evict(victim, PreemptMode.RECOMPUTE if mode is PreemptMode.PAUSE else mode, reason)
        return victim

    def take_turn(self, request: Request) -> None:
        """The policy left this running request out of a step."""
        mode = self._policy.preempt_mode(request, self._mode)
        if mode is not PreemptMode.PAUSE:
            self.displaced.add(request.request_id)
            self._evict(request, mode, "displaced")
        elif not request.is_paused:
            self._running.pause(request)
            self._count(request, 0, mode, "paused")
            self._policy.on_preempt([Preemption(request, 0, mode)])

    def give_turn(self, request: Request) -> None:
        """The policy lets this running request run."""
        if request.is_paused:
            self._running.go_on(request)
            self._events.went_on(request, request.num_computed_tokens)

    def restart(self, request: Request) -> None:
        """Back into the line because what is in flight for a request is of no use."""
        self._events.preempted(request, request.num_computed_tokens, "step_discarded")
        self._running.leave(request, RequestStatus.PREEMPTED, drops_steps=True)
        self._requeue(request)

    def _evict(self, victim: Request, mode: PreemptMode, reason: str) -> None:
        num_computed = victim.num_computed_tokens
        # What steps in flight compute is left out: one that samples something else than was foreseen is worth nothing.
        if mode is PreemptMode.SWAP and not self._kv.swap_out(victim, num_computed):
            mode = PreemptMode.RECOMPUTE
        num_lost = 0 if mode is PreemptMode.SWAP else num_computed
        self._running.leave(victim, RequestStatus.PREEMPTED)
        self._count(victim, num_lost, mode, reason)
        self._policy.on_preempt([Preemption(victim, num_lost, mode)])
        self._requeue(victim)

    def _count(self, request: Request, num_lost: int, mode: PreemptMode, reason: str) -> None:
        self._events.preempted(request, num_lost, reason, mode)
        self.num_preemptions += 1
        request.num_preemptions += 1

    def _requeue(self, request: Request) -> None:
        """By the policy's key, or in front of everybody."""
        key = self._policy.requeue_key(request)
        if key is None:
            self._waiting.push_front(request)
        else:
            self._waiting.push(request, key)
