"""Exact sums of probabilities, and where a running sum passes a bound.

Probabilities are float32 on a grid: rounded to multiples of 2**-52, float64 sums of them up to 2 are exact. So they are
the same in any order, on any device and however much of a row is summed up. What the rounding loses is below what a
draw of 53 bits can see.
"""

from __future__ import annotations

import numpy as np
import torch

_BLOCK = 256  # tokens that are summed up together
_GRID = 2.0**-29  # float32 numbers from here on are multiples of 2**-52


def softmax_(logits: torch.Tensor) -> torch.Tensor:
    """Make probabilities on the grid out of logits [N, V] in place, and return them."""
    for part in torch.split(logits, rows_at_once(logits)):
        part.copy_(part.softmax(dim=-1)).add_(_GRID).sub_(_GRID)
    return logits


def rows_at_once(logits: torch.Tensor) -> int:
    """How many rows of logits [N, V] to work on together: temporary memory stays small, and in a CPU's cache."""
    return max(1, (1 << 20 if logits.device.type == "cpu" else 1 << 26) // logits.shape[-1])


class RunningSums:
    """Of each row of probabilities [N, V] on the grid."""

    def __init__(self, probabilities: torch.Tensor) -> None:
        self._probabilities = probabilities
        self._mass = _block_sums(probabilities).cumsum(dim=-1)  # [N, blocks]

    @property
    def totals(self) -> torch.Tensor:
        """[N] float64."""
        return self._mass[:, -1]

    def first_above(self, bounds: torch.Tensor) -> torch.Tensor:
        """[N] int64: the first token at which the sum exceeds bounds [N] float64, none negative; V = nowhere.

        It never is a token of probability 0. A row with a NaN gets any number from 0 to V.
        """
        width, num_blocks = self._probabilities.shape[-1], self._mass.shape[-1]
        block = (self._mass <= bounds[:, None]).sum(dim=-1)
        is_found = block < num_blocks
        block = block.clamp_(max=num_blocks - 1)
        before = torch.where(block > 0, self._mass.gather(-1, (block - 1).clamp_(min=0)[:, None]).squeeze(-1), 0.0)
        places = block[:, None] * _BLOCK + torch.arange(_BLOCK, device=block.device)  # [N, tokens of a block]
        inside = self._probabilities.gather(-1, places.clamp_(max=width - 1)).double().cumsum(dim=-1)
        offset = (inside <= (bounds - before)[:, None]).sum(dim=-1)
        return torch.where(is_found, (block * _BLOCK + offset).clamp_(max=width - 1), width)


def _block_sums(probabilities: torch.Tensor) -> torch.Tensor:
    """[N, blocks] float64; the last block may be shorter."""
    num_rows, width = probabilities.shape
    whole = width // _BLOCK * _BLOCK
    blocks = probabilities[:, :whole].view(num_rows, whole // _BLOCK, _BLOCK)
    if probabilities.device.type == "cpu":  # torch would make a float64 copy first
        sums = torch.from_numpy(blocks.numpy().sum(axis=-1, dtype=np.float64))
    else:
        sums = blocks.sum(dim=-1, dtype=torch.float64)
    if whole == width:
        return sums
    return torch.cat([sums, probabilities[:, whole:].sum(dim=-1, keepdim=True, dtype=torch.float64)], dim=-1)
