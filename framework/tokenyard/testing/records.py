"""RequestRecord: what a harness knows of one request, before and after its end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.interfaces.scheduler import RequestStatus, WaitReason
from tokenyard.request import FinishReason
from tokenyard.sampling_params import SamplingParams
from tokenyard.testing.errors import ContractViolation

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.engine_outputs import FinishedRequest
    from tokenyard.interfaces.kv_cache import ExtraKey
    from tokenyard.interfaces.scheduler import RequestSnapshot
    from tokenyard.request import EngineCoreRequest, Retention


@dataclass(slots=True)
class RequestRecord:
    """Kept up to date after each call of the harness; also what a K/V manager may read of a request."""

    core: EngineCoreRequest
    max_total_tokens: int  # prompt and output: the length at which it must end
    status: RequestStatus = RequestStatus.WAITING
    num_computed: int = 0  # tokens whose K/V is there, steps in flight not counted; the last known when it has ended
    output_token_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    num_preemptions: int = 0
    num_resumed: int = 0  # times that it went on after a preemption
    prompt_logprobs_until: int = 1  # those of the prompt tokens before this one were delivered; the first has none
    num_cached: int = 0  # prompt tokens that the prefix cache saved at its first admission
    wait_reason: WaitReason | None = None
    wait_detail: str | None = None

    @property
    def is_finished(self) -> bool:
        return self.status is RequestStatus.FINISHED

    def take_snapshot(self, snapshot: RequestSnapshot) -> None:
        """What the scheduler says of a live request."""
        self.status = snapshot.status
        self.num_computed = snapshot.num_computed_tokens
        self.num_preemptions = snapshot.num_preemptions
        self.wait_reason, self.wait_detail = snapshot.wait_reason, snapshot.wait_detail

    def resume(self) -> None:
        """It enters the batch again. Of a request that ends before anyone asks for it, this is what is known."""
        self.num_resumed += 1
        self.num_preemptions = max(self.num_preemptions, self.num_resumed)

    def deliver(self, token_ids: Sequence[int]) -> None:
        """The engine gave these tokens out."""
        if self.is_finished:
            raise ContractViolation(
                "request.no_token_after_end", f"{self} ended ({self.finish_reason}) and then got {list(token_ids)}"
            )
        self.output_token_ids.extend(token_ids)

    def end(self, ended: FinishedRequest) -> None:
        """The engine said that it ended, and how."""
        self.finish(ended.reason)
        self.stop_reason, self.error = ended.stop_reason, ended.error

    def finish(self, reason: FinishReason) -> None:
        """It has ended."""
        if self.is_finished:
            raise ContractViolation(
                "request.ends_once", f"{self} ended ({self.finish_reason}) and ends again ({reason})"
            )
        self.status, self.finish_reason = RequestStatus.FINISHED, reason
        self.wait_reason, self.wait_detail = None, None

    def check_end(self) -> None:
        """It ended at the first token that ends it, and not before (S9 to S14)."""
        if self.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
            return
        due = self._due()
        # A stop string is found by the front end, so any output may end with `stop` and no token behind it.
        if due != self.finish_reason and not (due is None and self.finish_reason is FinishReason.STOP):
            raise ContractViolation(
                "request.ends_when_due",
                f"{self} with {len(self.output_token_ids)} output tokens {self.output_token_ids[-4:]} should "
                f"{f'have ended with {due}' if due else 'go on'}, but finish_reason is {self.finish_reason}",
            )

    def _due(self) -> FinishReason | None:
        """How its output must have ended it; None = it goes on."""
        params = self.core.params
        least = params.min_tokens if isinstance(params, SamplingParams) else 0
        longest = self.max_total_tokens - len(self.core.prompt_token_ids)
        for index, token in enumerate(self.output_token_ids):
            is_last = index == len(self.output_token_ids) - 1
            if token in self.core.stop_token_ids and index + 1 >= least:
                reason = FinishReason.STOP
            elif index + 1 >= longest:
                reason = FinishReason.LENGTH
            else:
                continue
            if not is_last:
                raise ContractViolation(
                    "request.ends_when_due", f"{self} should have ended at token {index}: {self.output_token_ids}"
                )
            return reason
        return None

    def __str__(self) -> str:
        return f"'{self.core.request_id}'"

    # What a K/V manager reads

    @property
    def request_id(self) -> str:
        return self.core.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.core.prompt_token_ids) + len(self.output_token_ids)

    @property
    def token_ids(self) -> IntArray:
        """[num_tokens] prompt and output"""
        return np.concatenate([self.core.prompt_token_ids, np.array(self.output_token_ids, dtype=np.int32)])

    @property
    def cache_salt(self) -> str | None:
        return self.core.cache_salt

    @property
    def lora_name(self) -> str | None:
        return self.core.lora_name

    @property
    def skip_prefix_cache(self) -> bool:
        return self.core.skip_prefix_cache

    @property
    def extra_keys(self) -> Sequence[ExtraKey]:
        return self.core.extra_keys

    @property
    def retention(self) -> Retention:
        return self.core.retention
