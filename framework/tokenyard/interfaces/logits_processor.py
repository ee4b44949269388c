"""LogitsProcessor: changes the logits of requests that ask for it, before a token is chosen."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch

    from tokenyard.arrays import IntArray
    from tokenyard.sampling_params import SamplingParams

COMPONENT_KIND = "logits_processor"
"""`component_kind` of the descriptors, and `logits_processors=[NAME]` the key that chooses them (since API 1.3)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsProcessorContext:
    """What a logits processor's factory is given, in the worker process, once the model is loaded."""

    vocab_size: int
    device_type: str  # cpu or cuda
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitsRequest:
    """A request that enters the worker's batch, new or resumed after a preemption."""

    request_id: str
    params: SamplingParams  # what the user asks of a processor is in `params.extra_args`
    prompt_token_ids: IntArray  # [num_prompt_tokens] read-only


class RowLogitsProcessor(Protocol):
    """The processor of one request, called for each of its tokens.

    What it does depends on its request and the output tokens alone: after a preemption another one, made by `start` for
    the same request, goes on with the same output tokens.
    """

    def __call__(self, logits: torch.Tensor, output_token_ids: IntArray, /) -> None:
        """Change `logits` ([vocab_size] float32) in place; -inf forbids a token.

        `output_token_ids` [num_output_tokens] are the tokens so far, read-only.
        """


class LogitsProcessor(ABC):
    """One for the whole engine, in the worker process; called from one thread, under torch.inference_mode.

    It runs before the penalties, on greedy and sampling requests alike. What it raises ends the one request it was
    called for, with finish reason `error`; the others are not disturbed.
    """

    @abstractmethod
    def start(self, request: LogitsRequest) -> RowLogitsProcessor | None:
        """The processor of one request; None = its logits stay as they are, which costs nothing."""
