"""What a request must meet to be queued: checked here again although front ends have checked it, since one bad request
must never reach the step loop that all share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.errors import CapacityError, ValidationError
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenyard.request import EngineCoreRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one engine. Lengths are in tokens."""

    max_model_len: int
    vocab_size: int
    capacity: int  # what one request can hold with the whole K/V cache to itself

    def total_length(self, request: EngineCoreRequest) -> int:
        """Prompt and output together: the length at which the request ends. Raises when it can never run."""
        if not isinstance(request.params, SamplingParams):
            raise ValidationError("pooling requests are not available", parameter="params", value=request.params)
        self._check_prompt(request)
        num_prompt = len(request.prompt_token_ids)
        wanted = self.max_model_len if request.params.max_tokens is None else request.params.max_tokens
        # The last token's K/V is never needed, so one more than the cache holds can be returned.
        return min(num_prompt + wanted, self.max_model_len, self.capacity + 1)

    def _check_prompt(self, request: EngineCoreRequest) -> None:
        ids = request.prompt_token_ids
        if not 0 < len(ids) < self.max_model_len:
            raise ValidationError(
                f"the prompt has {len(ids)} tokens; this model takes 1 to {self.max_model_len - 1}, so that one of its "
                f"{self.max_model_len} is left for the output",
                parameter="prompt",
                value=len(ids),
            )
        lowest, highest = int(ids.min()), int(ids.max())
        if lowest < 0 or highest >= self.vocab_size:
            bad = lowest if lowest < 0 else highest
            raise ValidationError(
                f"prompt token id {bad} is outside the vocabulary, 0 to {self.vocab_size - 1}",
                parameter="prompt",
                value=bad,
            )
        if len(ids) > self.capacity:
            raise CapacityError(
                f"the prompt has {len(ids)} tokens but the whole K/V cache holds {self.capacity}; shorten it, or give "
                "more room with kv_cache.num_blocks or kv_cache.memory"
            )
