"""Ledger: every request of a harness, kept up to date from what the engine says, and checked against it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tokenyard.errors import ValidationError
from tokenyard.testing.errors import ContractViolation
from tokenyard.testing.invariants import check_delivered, split_tokens
from tokenyard.testing.logprob_rules import check_prompt_logprobs, check_sampled_logprobs
from tokenyard.testing.trace import short

if TYPE_CHECKING:
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.interfaces.scheduler import SchedulerSnapshot
    from tokenyard.request import FinishReason
    from tokenyard.testing.records import RequestRecord
    from tokenyard.testing.worker_side import WorkerStep


class Ledger:
    """`live` are the requests whose end was not told yet."""

    def __init__(self) -> None:
        self.live: dict[str, RequestRecord] = {}
        self._records: dict[str, RequestRecord] = {}
        self._num_added = 0

    @property
    def records(self) -> Mapping[str, RequestRecord]:
        """By id; of two requests with one id the later one."""
        return self._records

    def next_id(self) -> str:
        """`0`, `1`, ..., but none that was used."""
        number = self._num_added
        while str(number) in self._records:
            number += 1
        return str(number)

    def add(self, record: RequestRecord) -> None:
        self._num_added += 1
        self._records[record.request_id] = self.live[record.request_id] = record

    def get(self, request_id: str) -> RequestRecord:
        """What a test asks for; raises ValidationError for an id that was never added."""
        if request_id not in self._records:
            raise ValidationError(
                f"no request '{request_id}' was added; there are {short(list(self._records))}",
                parameter="request_id",
                value=request_id,
            )
        return self._records[request_id]

    def resume(self, request_id: str) -> None:
        """A step takes it up again."""
        self._told(request_id).resume()

    def end(self, request_ids: Sequence[str], reason: FinishReason) -> None:
        """A call from outside ended these."""
        for request_id in request_ids:
            self._told(request_id).finish(reason)
            del self.live[request_id]

    def take(self, outputs: EngineCoreOutputs, landed: Sequence[WorkerStep] | None) -> None:
        """What one turn of the loop told; `landed` is what it is checked against, None = it is not."""
        delivered = split_tokens(outputs)
        if landed is not None:
            check_prompt_logprobs(outputs, self._records)
        for request_id, token_ids in delivered.items():
            self._told(request_id).deliver(token_ids)
        if landed is not None:
            check_sampled_logprobs(outputs, self._records)
        for admitted in outputs.admitted:
            self._told(admitted.request_id).num_cached = admitted.num_cached_tokens
        for ended in outputs.finished:
            self._told(ended.request_id).end(ended)
            del self.live[ended.request_id]
        for request_id in delivered:
            self._records[request_id].check_end()
        if landed is not None:
            check_delivered(landed, delivered, self.live)

    def take_snapshot(self, snapshot: SchedulerSnapshot) -> None:
        for row in (*snapshot.running, *snapshot.waiting):
            if row.request_id in self.live:
                self.live[row.request_id].take_snapshot(row)

    def holders(self, ids_in_flight: set[str]) -> list[RequestRecord]:
        """Requests that may hold blocks: live ones, and ended ones that a step in flight still names."""
        ended = (self._records[one] for one in ids_in_flight - self.live.keys() if one in self._records)
        return [*self.live.values(), *ended]

    def _told(self, request_id: str) -> RequestRecord:
        if request_id not in self._records:
            raise ContractViolation("request.only_live", f"the engine names '{request_id}', which was never added")
        return self._records[request_id]
