"""Rows of Logprobs: those of the tokens that are kept, and those of a part."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.runner_output import Logprobs

if TYPE_CHECKING:
    from tokenyard.arrays import BoolArray


def of_kept_tokens(logprobs: Logprobs, kept: BoolArray) -> Logprobs | None:
    """Logprobs of the tokens where `kept` [T] is true, as rows of what is left of the T tokens; None = none is left."""
    has_token = kept[logprobs.rows]
    if not has_token.any():
        return None
    places = np.cumsum(kept, dtype=np.int32) - 1
    return Logprobs(
        rows=places[logprobs.rows[has_token]],
        token_ids=logprobs.token_ids[has_token],
        logprobs=logprobs.logprobs[has_token],
        sampled_ranks=logprobs.sampled_ranks[has_token],
    )


def part_of(logprobs: Logprobs, start: int, stop: int) -> Logprobs:
    """Positions start .. stop, counted from 0: views, but for `rows`."""
    return Logprobs(
        rows=np.arange(stop - start, dtype=np.int32),
        token_ids=logprobs.token_ids[start:stop],
        logprobs=logprobs.logprobs[start:stop],
        sampled_ranks=logprobs.sampled_ranks[start:stop],
    )
