"""How several ranks sample: the leader chooses the tokens, and the others give their logits and take its tokens over.

Every rank makes the same calls of the group in the same order, also where rows fail, of which the leader alone knows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenyard.worker.prompt_logprobs import slices
from tokenyard.worker.uploads import to_device

if TYPE_CHECKING:
    from tokenyard.model.causal_lm import CausalLM
    from tokenyard.model.ranks import RankGroup
    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.worker.sampled_step import SampledRows


def tell_tokens(ranks: RankGroup, output: SchedulerOutput, sampled: SampledRows | None, device: torch.device) -> None:
    """By the leader: the tokens of all rows that were to sample; any for those that failed, which nobody reads."""
    rows = np.flatnonzero(output.samples)
    if ranks.size == 1 or not len(rows):
        return
    if sampled is not None and len(sampled.rows) == len(rows):
        ranks.from_leader(sampled.chosen.token_ids)
        return
    token_ids = torch.zeros(len(rows), dtype=torch.int64, device=device)
    if sampled is not None:
        token_ids[to_device(np.searchsorted(rows, sampled.rows), device)] = sampled.chosen.token_ids
    ranks.from_leader(token_ids)


def take_part(
    ranks: RankGroup, model: CausalLM, output: SchedulerOutput, states: torch.Tensor, device: torch.device
) -> torch.Tensor | None:
    """By another rank, with the states of a step that the leader is sampling: tokens of the rows that sample."""
    count = int(np.count_nonzero(output.samples))
    prompt_states = states[count:]
    for part in slices(len(prompt_states), model.shape.vocab_size):
        model.logits(prompt_states[part])
    if not count:
        return None
    model.logits(states[:count])
    return ranks.from_leader(torch.zeros(count, dtype=torch.int64, device=device))
