"""keep_turns: who goes on running when those that wait may displace those that run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.arrays import FloatArray, LongArray
    from tokenyard.interfaces.policy import PolicyContext, RequestView, SchedulerView

    Key = Callable[[RequestView], tuple[float, ...]]
    MayLose = Callable[[RequestView], bool]


def keep_turns(
    running: Sequence[RequestView],
    view: SchedulerView,
    limits: PolicyContext,
    key: Key,
    *,
    may_lose: MayLose = lambda request: True,
    keys: FloatArray | LongArray | None = None,
) -> Sequence[RequestView]:
    """Who of `running` keeps its turn when the best of those that run and wait are to run (since API 1.6).

    An answer for `SchedulingPolicy.running_order`; `limits` are what the policy's factory was given. Smaller keys are
    better, and the line must be in the same order: `waiting_key` and `requeue_key` sort as `key` does. Equal keys
    displace nobody. A request of which `may_lose` is False keeps the turn that it has.

    Turns are lost only to a request that can then enter: one that lacks a place, or blocks, and gets them from those
    that are worse. So no step is left emptier for one that would have to wait in any case. Prefills that take all
    tokens of a step let nobody enter, and are not displaced for that; `scheduler.long_prefill_token_threshold` bounds
    what one of them takes.

    `keys` [R] are the only numbers of the keys of `running`, for policies that have them as a column, such as
    `SchedulerView.running_columns` (since API 1.7): a step in which nobody can be displaced then asks for no key of
    those that run. They are what `key` gives to the last bit.
    """
    if keys is not None and len(keys) != len(running):
        raise ValueError(f"keep_turns was given {len(keys)} keys of {len(running)} requests")
    first = view.waiting(1)
    is_crowded = len(running) > limits.max_num_seqs  # so some of them are paused, and stay so
    if not is_crowded and not (first and _any_may_lose(running, key(first[0]), key, may_lose, keys)):
        return running
    # From best to worst; of equals the one that has its turn is better. Those that cannot lose it come first.
    ranked = sorted(
        running,
        key=lambda one: (one.is_paused or may_lose(one), key(one), one.is_paused, one.arrival_time, one.request_id),
    )
    kept = _Kept(ranked, view, limits)
    for request in view.waiting(limits.max_num_seqs):
        if not kept.make_way(request, key, may_lose):
            break
    stays = {request.request_id for request in kept.requests}
    return [request for request in running if request.request_id in stays]


def _any_may_lose(
    running: Sequence[RequestView],
    best: tuple[float, ...],
    key: Key,
    may_lose: MayLose,
    keys: FloatArray | LongArray | None,
) -> bool:
    """Whether somebody runs, or is paused, who can be displaced by who is `best` of those that wait."""
    if keys is not None:
        worse = (running[row] for row in (keys > best[0]).nonzero()[0].tolist())
        return any(request.is_paused or may_lose(request) for request in worse)
    return any(best < key(request) and (request.is_paused or may_lose(request)) for request in running)


class _Kept:
    """Those that keep their turns, from best to worst, and what is left for others to enter."""

    def __init__(self, ranked: Sequence[RequestView], view: SchedulerView, limits: PolicyContext) -> None:
        self._view = view
        self._max_chunk = limits.max_chunk_tokens
        self._num_places = limits.max_num_seqs
        self.requests = list(ranked[: limits.max_num_seqs])
        # What those hold that stay paused is taken from them when it is needed.
        self._losers = list(ranked[limits.max_num_seqs :])
        self._num_blocks = view.num_free_blocks + sum(map(view.num_exclusive_blocks, self._losers))
        self._num_tokens = limits.max_num_batched_tokens
        for request in self.requests:
            num_tokens, num_blocks = self._due(request)
            self._num_tokens -= num_tokens
            self._num_blocks -= num_blocks

    def make_way(self, request: RequestView, key: Key, may_lose: MayLose) -> bool:
        """Take from `requests` who loses its turn to `request`; False, with nothing changed, if it cannot enter."""
        needed = self._view.num_blocks_needed(request, self._losers)
        num_blocks, num_tokens, num_kept = self._num_blocks, self._num_tokens, len(self.requests)
        while num_kept >= self._num_places or num_blocks < needed:
            worst = self.requests[num_kept - 1] if num_kept else None
            if worst is None or not key(request) < key(worst) or not (worst.is_paused or may_lose(worst)):
                return False
            num_kept -= 1
            tokens_due, blocks_due = self._due(worst)
            num_tokens += tokens_due
            num_blocks += blocks_due + self._view.num_exclusive_blocks(worst)
            if num_blocks >= needed:  # what they shared with the request has to be taken from the free blocks then
                needed = self._view.num_blocks_needed(request, [*self._losers, *self.requests[num_kept:]])
        tokens_due, _ = self._due(request)
        if num_tokens < (tokens_due if self._max_chunk is None else 1):
            return False
        self._losers += self.requests[num_kept:]
        del self.requests[num_kept:]
        self._num_places -= 1
        self._num_blocks, self._num_tokens = num_blocks - needed, num_tokens - tokens_due
        return True

    def _due(self, request: RequestView) -> tuple[int, int]:
        """The most that it takes of a step: tokens, and new blocks if it runs already."""
        computed = request.num_computed_tokens + request.num_in_flight_tokens
        missing = request.num_prompt_tokens + request.num_output_tokens - computed
        if missing <= 1:  # a decode, which needs a block when it has come to the end of its last one
            return 1, int(computed % self._view.block_size == 0)
        return missing if self._max_chunk is None else min(missing, self._max_chunk), 0
