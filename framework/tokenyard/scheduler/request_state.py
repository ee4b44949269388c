"""Request: the scheduler's record of one request, and the view of it that policies and KV managers get."""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tokenyard.arrays import IntArray
    from tokenyard.request import EngineCoreRequest, ServiceLevel
    from tokenyard.scheduler.slots import SlotTable


class RequestStatus(Enum):
    """Where a request is in its life."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class Request:
    """Facts that never change live in `core`; what changes every step lives in the slot table while one is held."""

    __slots__ = (
        "_attained_service",
        "_table",
        "_tokens",
        "core",
        "max_total_tokens",
        "num_preemptions",
        "slot",
        "status",
    )

    def __init__(self, core: EngineCoreRequest, max_total_tokens: int) -> None:
        self.core = core
        self.status = RequestStatus.WAITING
        self.max_total_tokens = max_total_tokens  # prompt + output: the request ends at this length
        self.num_preemptions = 0
        self.slot: int | None = None
        self._attained_service = 0
        self._table: SlotTable | None = None
        self._tokens: IntArray = np.asarray(core.prompt_token_ids, dtype=np.int32)

    # What a KV manager reads

    @property
    def request_id(self) -> str:
        return self.core.request_id

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
        return self.core.skip_prefix_cache

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
        return int(self._table.num_computed[self.slot] - self._table.num_in_flight[self.slot])

    @property
    def num_in_flight_tokens(self) -> int:
        if self._table is None or self.slot is None:
            return 0
        return int(self._table.num_in_flight[self.slot])

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
        return int(self._table.attained_service[self.slot])

    @property
    def metadata(self) -> Mapping[str, object]:
        return self.core.metadata

    # Moving in and out of the slot table

    def enter(self, table: SlotTable, slot: int) -> None:
        """From now on the table holds the tokens."""
        self._table, self.slot, self.status = table, slot, RequestStatus.RUNNING

    def leave(self, status: RequestStatus) -> None:
        """Take the tokens out of the table."""
        self._tokens = self.token_ids.copy()
        self._attained_service = self.attained_service
        self._table, self.slot, self.status = None, None, status
