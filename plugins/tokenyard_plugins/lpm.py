"""`scheduler=lpm`: who has the longest prefix in the cache goes first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import PolicyDescriptor, hookimpl
from tokenyard.interfaces import SchedulingPolicy

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView


@dataclass(frozen=True, slots=True, kw_only=True)
class LPMOptions:
    """Options of the policy, under `scheduler.policy`."""

    patience: float | None = 16.0  # computed tokens, of all requests, that waiting for one more cached token is worth
    duplicate_tokens: int | None = 32  # who shares so many that another computes waits for them; None = nobody does

    def __post_init__(self) -> None:
        if self.patience is not None and not 0 <= self.patience < float("inf"):
            raise ValueError(f"patience={self.patience} is not valid: it must be a number, 0 or more, or null")
        if self.duplicate_tokens is not None and self.duplicate_tokens < 1:
            raise ValueError(f"duplicate_tokens={self.duplicate_tokens} is not valid: it must be 1 or more, or null")


class LPMPolicy(SchedulingPolicy):
    """Longest prefix match (Zheng et al., SGLang, NeurIPS 2024) over the first `waiting_window` requests in line.

    Who has more cached tokens overtakes those that came up to `patience` computed tokens before it for each token that
    it has more. So waiting is bounded; with `patience=null` nothing bounds it. A request waits on while another, in
    prefill or before it in the order, is about to compute the next `duplicate_tokens` that it would compute itself.
    """

    def __init__(self, options: LPMOptions, context: PolicyContext) -> None:
        self._patience, self._duplicate_tokens = options.patience, options.duplicate_tokens
        self.may_starve = options.patience is None

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        hits = {one.request_id: view.hit_tokens(one) for one in window}
        order = sorted(window, key=lambda one: (self._rank(one, hits), one.arrival_time, one.request_id))
        if self._duplicate_tokens is None:
            return order
        computing = {self._next_part(one, one.num_computed_tokens, view) for one in view.prefills}
        chosen: list[RequestView] = []
        for one in order:
            if (part := self._next_part(one, hits[one.request_id], view)) is None or part not in computing:
                chosen.append(one)
                computing.add(part)
        return chosen

    def _rank(self, request: RequestView, hits: Mapping[str, int]) -> float:
        num_cached = hits[request.request_id]
        return -num_cached if self._patience is None else request.arrival_tokens - self._patience * num_cached

    def _next_part(self, request: RequestView, num_cached: int, view: SchedulerView) -> bytes | None:
        """A name of its first `duplicate_tokens` that are not cached, and all before."""
        blocks = view.prefix_hashes(request)
        last = num_cached // view.block_size + ((self._duplicate_tokens or 1) - 1) // view.block_size
        return blocks[last] if last < len(blocks) else None


@hookimpl
def tokenyard_policies() -> Iterator[PolicyDescriptor[LPMOptions]]:
    yield PolicyDescriptor(
        name="lpm",
        api_version=(1, 7),
        summary="the longest cached prefix first, and duplicates of what is being computed wait for it",
        options_type=LPMOptions,
        factory=LPMPolicy,
    )
