"""What Triton's interpreter gets wrong, found out by asking it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_SIDE = 16


@triton.jit
def _product_kernel(left, right, out, SIDE: tl.constexpr):
    rows = tl.arange(0, SIDE)
    places = rows[:, None] * SIDE + rows[None, :]
    tl.store(out + places, tl.dot(tl.load(left + places), tl.load(right + places)))


def multiplies_bfloat16() -> bool:
    """False where it takes bfloat16 numbers for the integers that their bits spell, as Triton 3.6 to 3.9 do."""
    ones, out = torch.ones(_SIDE, _SIDE, dtype=torch.bfloat16), torch.empty(_SIDE, _SIDE)
    _product_kernel[(1,)](ones, ones, out, SIDE=_SIDE)
    return bool((out == _SIDE).all())
