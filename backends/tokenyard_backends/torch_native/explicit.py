"""Attention with its scores in hand, in float32: soft caps, sinks and log-sum-exp, which torch's own has not."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from tokenyard.interfaces import AttentionLayer


def attend_explicitly(
    layer: AttentionLayer,
    query: torch.Tensor,  # [B, HK, G, Q, D]
    key: torch.Tensor,  # [B, HK, L, D]
    value: torch.Tensor,  # [B, HK, L, DV]
    mask: torch.Tensor | None,  # [B, 1, 1, L] or [Q, L], added to scores
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [B, HK, G, Q, DV] in the query's data type, and the log of each denominator [B, HK, G, Q]."""
    scores = _scores(layer, query, key)
    if mask is not None:
        scores = scores + (mask.unsqueeze(1) if mask.dim() == 4 else mask).float()
    highest = scores.amax(-1, keepdim=True)
    sinks = None if layer.sinks is None else layer.sinks.float().view(1, *query.shape[1:3], 1, 1)
    if sinks is not None:
        highest = torch.maximum(highest, sinks)
    weights = (scores - highest).exp_()
    denominator = weights.sum(-1, keepdim=True)
    if sinks is not None:
        denominator = denominator + (sinks - highest).exp()
    weighted = weights.flatten(2, 3) @ value.float()  # [B, HK, G * Q, DV]
    output = weighted.view(*query.shape[:4], -1) / denominator
    return output.to(query.dtype), (highest + denominator.log()).squeeze(-1)


def _scores(layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """[B, HK, G, Q, L]; the group is folded into the query rows, so that keys are not repeated."""
    folded = query.flatten(2, 3).float() @ key.float().transpose(2, 3)
    scores = folded.mul_(layer.scale).view(*query.shape[:4], -1)
    return scores if layer.soft_cap is None else scores.div_(layer.soft_cap).tanh_().mul_(layer.soft_cap)
