"""EngineCoreOutputs for tests of what reads them: rows of (engine id, tokens), with scripted logprobs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from tokenyard.engine_outputs import AdmittedRequest, EngineCoreOutputs, FinishedRequest
from tokenyard.request import FinishReason
from tokenyard.runner_output import Logprobs, PromptLogprobs


def logprob_of(token_id: int) -> float:
    """A float32's value that depends on the token alone."""
    return -float(token_id + 1) / 8


def logprob_rows(tokens: Sequence[tuple[int, int]], most_likely: Sequence[int] = ()) -> Logprobs:
    """Rows of (place, token id), each with the same most likely tokens; a token's own rank is 1 + its id."""
    ids = [[token_id, *most_likely] for _, token_id in tokens]
    return Logprobs(
        rows=np.array([place for place, _ in tokens], dtype=np.int32),
        token_ids=np.array(ids, dtype=np.int32).reshape(len(tokens), 1 + len(most_likely)),
        logprobs=np.array([[logprob_of(token_id) for token_id in row] for row in ids], dtype=np.float32),
        sampled_ranks=np.array([1 + token_id for _, token_id in tokens], dtype=np.int32),
    )


def prompt_logprobs(
    request_id: str, start: int, token_ids: Sequence[int], most_likely: Sequence[int] = ()
) -> PromptLogprobs:
    rows = logprob_rows(list(enumerate(token_ids)), most_likely)
    return PromptLogprobs(request_id=request_id, start=start, logprobs=rows)


def ended(request_id: str, reason: str = "length", **details: object) -> FinishedRequest:
    return FinishedRequest(request_id=request_id, reason=FinishReason(reason), **details)  # type: ignore[arg-type]


def step(
    rows: Sequence[tuple[str, Sequence[int]]] = (),
    *,
    finished: Sequence[FinishedRequest] = (),
    logprobs: Logprobs | None = None,
    prompt: Sequence[PromptLogprobs] = (),
    admitted: Sequence[tuple[str, int]] = (),
) -> EngineCoreOutputs:
    """`admitted` is (engine id, cached tokens); the first step of each began at 2.0."""
    return EngineCoreOutputs(
        request_ids=tuple(request_id for request_id, _ in rows),
        num_tokens=np.array([len(tokens) for _, tokens in rows], dtype=np.int32),
        token_ids=np.array([token for _, tokens in rows for token in tokens], dtype=np.int32),
        finished=finished,
        logprobs=logprobs,
        prompt_logprobs=prompt,
        admitted=[
            AdmittedRequest(request_id=request_id, num_cached_tokens=cached, scheduled_at=2.0)
            for request_id, cached in admitted
        ],
    )
