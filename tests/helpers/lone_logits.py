"""The logits of one sequence that runs alone, with the plainest attention."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from tokenyard.model.self_check import PackedReference, Part

if TYPE_CHECKING:
    from tokenyard.model.causal_lm import CausalLM, PagedAttention


@torch.inference_mode()
def logits_of(model: CausalLM, tokens: torch.Tensor) -> torch.Tensor:
    """Float32 logits [T, V] of tokens [T]."""
    attention = PackedReference(model.shape.layers)
    attention.begin_step([Part(0, 0, len(tokens))])
    positions = torch.arange(len(tokens))
    return model.forward(tokens, positions, positions, cast("PagedAttention", attention))  # the same call
