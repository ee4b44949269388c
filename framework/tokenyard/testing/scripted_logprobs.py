"""Log probabilities without a model: of each request, position and token a number of its own."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.runner_output import Logprobs, PromptLogprobs
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenyard.request import PoolingParams
    from tokenyard.testing.worker_side import StepRow, WorkerStep

_PADDING = -1


def logprob_of(request_id: str, position: int, token_id: int) -> float:
    """What a scripted executor says of a token; a float32 holds it."""
    return -(zlib.crc32(f"{request_id}/{position}/{token_id}".encode()) % 4096) / 64


def num_logprobs(params: SamplingParams | PoolingParams, vocab_size: int, *, of_prompt: bool = False) -> int | None:
    """How many of the most likely tokens a request asks for; None = no log probabilities."""
    if not isinstance(params, SamplingParams):
        return None
    wanted = params.prompt_logprobs if of_prompt else params.logprobs
    return vocab_size if wanted == -1 else wanted


def sampled_logprobs(step: WorkerStep, vocab_size: int) -> Logprobs | None:
    """Of the step's sampled tokens, for the rows that ask."""
    rows, positions = [], []
    place = 0
    for row in step.rows:
        count = num_logprobs(row.held.params, vocab_size)
        for index, token_id in enumerate(row.sampled):
            if count is not None:
                rows.append(place)
                positions.append(_position(row.held.request_id, row.end + index, token_id, count, vocab_size))
            place += 1
    return _logprobs(rows, positions) if rows else None


def prompt_logprobs(step: WorkerStep, vocab_size: int) -> list[PromptLogprobs]:
    """Of the prompt tokens that follow those which the step computes, for the rows that are asked."""
    return [chunk for row in step.rows if row.wants_prompt_logprobs for chunk in _chunk(row, vocab_size)]


def _chunk(row: StepRow, vocab_size: int) -> Iterable[PromptLogprobs]:
    held, first = row.held, row.start + 1
    count = num_logprobs(held.params, vocab_size, of_prompt=True)
    token_ids = held.chain.tokens[first : min(row.end + 1, held.num_prompt_tokens)]
    if count is not None and token_ids:
        positions = [
            _position(held.request_id, position, token_id, count, vocab_size)
            for position, token_id in enumerate(token_ids, first)
        ]
        logprobs = _logprobs(range(len(positions)), positions)
        yield PromptLogprobs(request_id=held.request_id, start=first, logprobs=logprobs)


def _position(request_id: str, position: int, token_id: int, count: int, vocab_size: int) -> list[tuple[int, float]]:
    """The token, then the `count` most likely ones: those that follow it in the vocabulary, less and less likely."""
    value = logprob_of(request_id, position, token_id)
    return [(token_id, value), *(((token_id + n) % vocab_size, value - n) for n in range(1, count + 1))]


def _logprobs(rows: Sequence[int], positions: Sequence[Sequence[tuple[int, float]]]) -> Logprobs:
    width = max(len(position) for position in positions)
    token_ids = np.full((len(positions), width), _PADDING, dtype=np.int32)
    logprobs = np.full((len(positions), width), np.finfo(np.float32).min, dtype=np.float32)
    for index, position in enumerate(positions):
        token_ids[index, : len(position)] = [token_id for token_id, _ in position]
        logprobs[index, : len(position)] = [value for _, value in position]
    return Logprobs(
        rows=np.array(rows, dtype=np.int32),
        token_ids=token_ids,
        logprobs=logprobs,
        sampled_ranks=np.ones(len(positions), dtype=np.int32),
    )
