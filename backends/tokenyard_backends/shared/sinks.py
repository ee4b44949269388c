"""Attention sinks, added after a kernel that does not know them.

A sink s only adds exp(s) to the softmax's denominator. So with the log-sum-exp L of the kernel, its output is to be
multiplied by sigmoid(L - s), and the log-sum-exp becomes log(exp(L) + exp(s)).

Legend: T = query rows, H = query heads, D = head size.
"""

from __future__ import annotations

import torch


def add_sinks(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Let `sinks` [H] join the softmax of `out` [T, H, D] and `lse` [T, H] float32 (natural), in place."""
    sinks = sinks.float()
    out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))
    torch.logaddexp(lse, sinks.expand_as(lse), out=lse)
