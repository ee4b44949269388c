"""RequestOutput and CompletionOutput: results as users see them, with vLLM's names."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestMetrics:
    """Times of one request, in engine-clock seconds; None = not reached."""

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    finished_time: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Logprob:
    """How likely one token was at one position, by the model's own logits."""

    logprob: float  # natural logarithm; always finite
    rank: int | None = None  # 1 = the most likely token of the vocabulary
    decoded_token: str | None = None  # the token's text there; None with detokenize=False
    token_bytes: bytes | None = None  # its bytes, which need not be whole characters; None with detokenize=False


LogprobsOfPosition: TypeAlias = dict[int, Logprob]
"""By token id: the position's own token, and the most likely ones."""


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One completion of a request."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None  # of the sampled tokens; None unless logprobs were asked for
    logprobs: list[LogprobsOfPosition] | None = None  # one for each of token_ids
    routed_experts: None = None
    finish_reason: str | None = None  # stop, length, abort, error
    stop_reason: int | str | None = None  # the stop string or token id that matched; None for EOS
    lora_request: None = None
    kv_transfer_params: None = None

    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """A request with what it has produced so far."""

    request_id: str
    prompt: str | None  # None when the prompt was given as token ids
    prompt_token_ids: list[int]
    prompt_logprobs: list[LogprobsOfPosition | None] | None = None  # one a prompt token; the first is None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    metrics: RequestMetrics | None = None
    lora_request: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache saved
    kv_transfer_params: None = None
    error: str | None = None  # set when finish_reason is "error"
