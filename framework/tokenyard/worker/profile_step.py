"""Steps of nobody: the largest that a scheduler may ask for, to see its memory, and small ones to prepare the rest."""

from __future__ import annotations

import numpy as np

from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler_output import RequestStart, SchedulerOutput, Slot

NUM_BLOCKS = 2
"""Blocks of the K/V cache that a step needs: the null block, and one that stands in every place of every table."""

# What needs most: probabilities in order, and raw logits kept besides.
_PARAMS = SamplingParams(temperature=1.0, top_p=0.9, logprobs=1, seed=0)

_FEW_ROWS, _FEW_TOKENS = 2, 17


def query_lens(num_tokens: int, num_seqs: int, max_model_len: int) -> list[int]:
    """Tokens of each row of the largest step: as many rows as may be, and the longest prompt among them."""
    num_rows = min(num_seqs, num_tokens)
    left, lengths = num_tokens - num_rows, []
    for _ in range(num_rows):
        extra = min(left, max_model_len - 1)
        lengths.append(1 + extra)
        left -= extra
    return lengths


def largest_step(
    *, num_tokens: int, num_seqs: int, max_model_len: int, block_size: int, num_groups: int
) -> SchedulerOutput:
    """Every row is the end of a sequence of the greatest length, whose blocks are all the same one."""
    counts = np.array(query_lens(num_tokens, num_seqs, max_model_len), dtype=np.int32)
    slots = np.arange(len(counts), dtype=np.int64)
    blocks = np.ones(-(-max_model_len // block_size), dtype=np.int32)
    starts = tuple(
        RequestStart(
            request_id=f"profile-{slot}",
            slot=Slot(slot, 1),
            token_ids=np.zeros(1, dtype=np.int32),
            num_prompt_tokens=1,
            num_computed_tokens=max_model_len - count,
            block_ids=(blocks,) * num_groups,
            params=_PARAMS,
        )
        for slot, count in enumerate(counts.tolist())
    )
    return SchedulerOutput(
        step=0,
        new=starts,
        slots=slots,
        generations=np.ones(len(counts), dtype=np.int32),
        num_computed_tokens=max_model_len - counts,
        num_scheduled_tokens=counts,
        samples=np.ones(len(counts), dtype=np.bool_),
    )


def first_steps(
    *, num_tokens: int, num_seqs: int, max_model_len: int, block_size: int, num_groups: int
) -> list[SchedulerOutput]:
    """One of each kind, within the limits of `largest_step`: decoding rows alone, and one row behind part of a prompt.

    Backends choose between kernels by these kinds, and may compile one when it is first called.
    """
    num_rows = min(_FEW_ROWS, num_seqs, num_tokens)
    return [
        largest_step(
            num_tokens=count,
            num_seqs=num_rows,
            max_model_len=max_model_len,
            block_size=block_size,
            num_groups=num_groups,
        )
        for count in (num_rows, min(_FEW_TOKENS, num_tokens))
    ]
