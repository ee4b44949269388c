"""Log probabilities as messages: of sampled tokens, and of prompts."""

from __future__ import annotations

import msgspec
import numpy as np

from tokenyard.ipc.codec import Array
from tokenyard.runner_output import Logprobs, PromptLogprobs


class LogprobsMessage(msgspec.Struct, frozen=True, array_like=True):
    """See Logprobs."""

    rows: Array
    token_ids: Array
    logprobs: Array
    sampled_ranks: Array


class PromptLogprobsMessage(msgspec.Struct, frozen=True, array_like=True):
    """See PromptLogprobs."""

    request_id: str
    start: int
    logprobs: LogprobsMessage


def prompt_logprobs_to_message(chunk: PromptLogprobs) -> PromptLogprobsMessage:
    """What crosses processes."""
    return PromptLogprobsMessage(chunk.request_id, chunk.start, logprobs_to_message(chunk.logprobs))


def prompt_logprobs_from_message(message: PromptLogprobsMessage) -> PromptLogprobs:
    """Raises ValueError for arrays that do not fit each other."""
    logprobs = logprobs_from_message(message.logprobs)
    return PromptLogprobs(request_id=message.request_id, start=message.start, logprobs=logprobs)


def logprobs_to_message(logprobs: Logprobs) -> LogprobsMessage:
    """What crosses processes."""
    return LogprobsMessage(
        Array.of(logprobs.rows),
        Array.of(logprobs.token_ids),
        Array.of(logprobs.logprobs),
        Array.of(logprobs.sampled_ranks),
    )


def logprobs_from_message(message: LogprobsMessage) -> Logprobs:
    """Raises ValueError for arrays that do not fit each other."""
    rows, ranks = message.rows.values(np.int32, 1), message.sampled_ranks.values(np.int32, 1)
    token_ids, logprobs = message.token_ids.values(np.int32, 2), message.logprobs.values(np.float32, 2)
    if token_ids.shape != logprobs.shape or not len(rows) == len(ranks) == len(token_ids):
        raise ValueError(f"logprobs of {len(rows)} rows, {len(ranks)} ranks and shape {logprobs.shape}")
    return Logprobs(rows=rows, token_ids=token_ids, logprobs=logprobs, sampled_ranks=ranks)
