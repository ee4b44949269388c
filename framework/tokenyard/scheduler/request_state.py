"""Request: the scheduler's record of one request, and the view of it that policies and KV managers get."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.interfaces.scheduler import RequestSnapshot, RequestStatus
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenyard.arrays import IntArray
    from tokenyard.interfaces.kv_cache import ExtraKey
    from tokenyard.interfaces.scheduler import WaitReason
    from tokenyard.request import EngineCoreRequest, Retention, ServiceLevel
    from tokenyard.scheduler.slots import SlotTable


class Request:
    """Facts that never change live in `core`; what changes every step lives in the slot table while one is held."""

    __slots__ = (
        "_attained_service",
        "_table",
        "_tokens",
        "arrival_tokens",
        "asks_prompt_logprobs",
        "core",
        "is_paused",
        "max_total_tokens",
        "min_stop_tokens",
        "num_preemptions",
        "prompt_logprobs_until",
        "queued_in",
        "request_id",
        "slot",
        "status",
    )

    def __init__(self, core: EngineCoreRequest, max_total_tokens: int, min_tokens: int = 0) -> None:
        self.core = core
        self.request_id = core.request_id
        self.status = RequestStatus.WAITING
        self.max_total_tokens = max_total_tokens  # prompt + output: the request ends at this length
        # A stop token below this length does not end the request.
        self.min_stop_tokens = len(core.prompt_token_ids) + min_tokens
        self.num_preemptions = 0
        self.is_paused = False
        self.arrival_tokens = 0
        params = core.params
        self.asks_prompt_logprobs = isinstance(params, SamplingParams) and params.prompt_logprobs is not None
        self.prompt_logprobs_until = 1  # of the prompt tokens before this one they were delivered; the first has none
        self.queued_in = 0  # the number of schedules before it was queued
        self.slot: int | None = None
        self._attained_service = 0
        self._table: SlotTable | None = None
        self._tokens: IntArray = np.asarray(core.prompt_token_ids, dtype=np.int32)

    # What a KV manager reads

    @property
    def token_ids(self) -> IntArray:
        """[num_tokens] a view, valid until the next step."""
        if self._table is None or self.slot is None:
            return self._tokens
        return self._table.token_ids[self.slot, : self.num_tokens]

    @property
    def num_tokens(self) -> int:
        if self._table is None or self.slot is None:
            return len(self._tokens)
        return int(self._table.num_tokens[self.slot])

    @property
    def cache_salt(self) -> str | None:
        return self.core.cache_salt

    @property
    def lora_name(self) -> str | None:
        return self.core.lora_name

    @property
    def skip_prefix_cache(self) -> bool:
        # What is not computed has no logits: whether the front end thought of it or not.
        return self.core.skip_prefix_cache or self.asks_prompt_logprobs

    @property
    def extra_keys(self) -> Sequence[ExtraKey]:
        return self.core.extra_keys

    @property
    def retention(self) -> Retention:
        return self.core.retention

    # What a policy reads besides

    @property
    def arrival_time(self) -> float:
        return self.core.arrival_time

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.core.prompt_token_ids)

    @property
    def num_computed_tokens(self) -> int:
        if self._table is None or self.slot is None:
            return 0
        return int(self._table.num_computed[self.slot] - self._table.tokens_in_flight[self.slot])

    @property
    def num_in_flight_tokens(self) -> int:
        if self._table is None or self.slot is None:
            return 0
        return int(self._table.tokens_in_flight[self.slot])

    @property
    def num_output_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def max_output_tokens(self) -> int:
        return self.max_total_tokens - self.num_prompt_tokens

    @property
    def priority(self) -> int:
        return self.core.priority

    @property
    def client_id(self) -> str | None:
        return self.core.client_id

    @property
    def session_id(self) -> str | None:
        return self.core.session_id

    @property
    def parent_id(self) -> str | None:
        return self.core.parent_id

    @property
    def deadline(self) -> float | None:
        return self.core.deadline

    @property
    def service_level(self) -> ServiceLevel | None:
        return self.core.service_level

    @property
    def attained_service(self) -> int:
        if self._table is None or self.slot is None:
            return self._attained_service
        return int(self._table.service_before[self.slot]) + self.num_computed_tokens

    @property
    def metadata(self) -> Mapping[str, object]:
        return self.core.metadata

    def snapshot(self, wait_reason: WaitReason | None, wait_detail: str | None = None) -> RequestSnapshot:
        """The request as it is now."""
        return RequestSnapshot(
            request_id=self.request_id,
            status=self.status,
            num_prompt_tokens=self.num_prompt_tokens,
            num_computed_tokens=self.num_computed_tokens,
            num_in_flight_tokens=self.num_in_flight_tokens,
            num_output_tokens=self.num_output_tokens,
            num_preemptions=self.num_preemptions,
            wait_reason=wait_reason,
            wait_detail=wait_detail,
            is_paused=self.is_paused,
        )

    def lacks_prompt_logprobs(self, num_computed: int) -> bool:
        """Whether a step that computes the tokens before `num_computed` has prompt logprobs that were never delivered.

        The logits of a position are about the token behind it. What other steps in flight bring need not be known:
        those of one stay are disjoint, and nobody enters again before the last one of an earlier stay has landed.
        """
        return self.asks_prompt_logprobs and self.prompt_logprobs_until < min(num_computed + 1, self.num_prompt_tokens)

    # Moving in and out of the slot table

    def enter(self, table: SlotTable, slot: int) -> None:
        """From now on the table holds the tokens."""
        self._table, self.slot, self.status = table, slot, RequestStatus.RUNNING

    def append(self, token_ids: IntArray) -> None:
        """New tokens, wherever the request is."""
        if self._table is None or self.slot is None:
            self._tokens = np.concatenate((self._tokens, token_ids))
            return
        known = self.num_tokens
        self._table.token_ids[self.slot, known : known + len(token_ids)] = token_ids
        self._table.num_tokens[self.slot] += len(token_ids)

    def attain(self, num_tokens: int) -> None:
        """Tokens were computed by a step that was in flight when the request left the table."""
        self._attained_service += num_tokens

    def leave(self, status: RequestStatus) -> None:
        """Take the tokens out of the table."""
        self._tokens = self.token_ids.copy()
        self._attained_service = self.attained_service
        self._table, self.slot, self.status = None, None, status
