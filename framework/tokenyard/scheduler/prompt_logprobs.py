"""Prompt logprobs on their way through the scheduler: each position once, to requests that are still there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.logprob_rows import part_of
from tokenyard.runner_output import PromptLogprobs

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tokenyard.scheduler.request_state import Request


def undelivered(chunks: Sequence[PromptLogprobs], requests: Iterable[Request]) -> tuple[PromptLogprobs, ...]:
    """What the `requests` did not get yet of a step's chunks; from now on they have got it.

    A chunk comes in part again when its request was preempted, since steps are cut elsewhere after that.
    """
    by_id = {request.request_id: request for request in requests}
    new = []
    for chunk in chunks:
        request = by_id.get(chunk.request_id)
        stop = chunk.start + len(chunk.logprobs.rows)
        if request is None or stop <= request.prompt_logprobs_until:
            continue
        start = max(chunk.start, request.prompt_logprobs_until)
        request.prompt_logprobs_until = stop
        new.append(chunk if start == chunk.start else _from(chunk, start))
    return tuple(new)


def _from(chunk: PromptLogprobs, start: int) -> PromptLogprobs:
    logprobs = part_of(chunk.logprobs, start - chunk.start, len(chunk.logprobs.rows))
    return PromptLogprobs(request_id=chunk.request_id, start=start, logprobs=logprobs)
