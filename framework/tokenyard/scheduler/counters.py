"""Counters: what a scheduler has counted since its start."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenyard.scheduler.request_state import Request


class Counters:
    """Prompt tokens and prefix-cache look-ups count once a request, when it is admitted; resumed ones count apart."""

    def __init__(self, *, counts_prefix_cache: bool) -> None:
        self._counts_prefix_cache = counts_prefix_cache
        self.num_prompt_tokens = 0
        self.num_generation_tokens = 0
        self.num_computed_tokens = 0
        self.prefix_cache_queries = 0
        self.prefix_cache_hits = 0
        self.preempted_prefix_cache_queries = 0
        self.preempted_prefix_cache_hits = 0
        self.num_rejected_by_reason: dict[str, int] = {}

    def admit(self, request: Request, num_cached_tokens: int, *, is_resumed: bool) -> None:
        """A request entered the batch. A cache that is off, or that the request does not read, was not asked."""
        if not is_resumed:
            self.num_prompt_tokens += request.num_prompt_tokens
        if not self._counts_prefix_cache or request.skip_prefix_cache:
            return
        if is_resumed:
            self.preempted_prefix_cache_queries += request.num_tokens
            self.preempted_prefix_cache_hits += num_cached_tokens
        else:
            self.prefix_cache_queries += request.num_prompt_tokens
            self.prefix_cache_hits += num_cached_tokens

    def reject(self, reason: str) -> None:
        """A request will not run."""
        self.num_rejected_by_reason[reason] = self.num_rejected_by_reason.get(reason, 0) + 1
