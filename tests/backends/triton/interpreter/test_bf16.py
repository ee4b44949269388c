"""The interpreter as the helper mends it: what follows would mean nothing otherwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _product_kernel(left, right, out, side: tl.constexpr):
    rows = tl.arange(0, side)
    places = rows[:, None] * side + rows[None, :]
    product = tl.dot(tl.load(left + places), tl.load(right + places))
    tl.store(out + places, product.to(out.dtype.element_ty))


@triton.jit
def _round_kernel(values, out, size: tl.constexpr):
    places = tl.arange(0, size)
    tl.store(out + places, tl.load(values + places).to(tl.bfloat16))


def test_products_of_bfloat16_tiles_are_those_of_the_numbers() -> None:
    random = torch.Generator().manual_seed(0)
    left, right = (torch.randn(16, 16, generator=random).bfloat16() for _ in range(2))
    out = torch.empty(16, 16)
    _product_kernel[(1,)](left, right, out, side=16)
    torch.testing.assert_close(out, left.float() @ right.float())


def test_float32_is_rounded_to_bfloat16_as_torch_does_it() -> None:
    random = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**31), 2**31, (4096,), generator=random, dtype=torch.int64).to(torch.int32)
    values = bits.view(torch.float32)
    ties = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -1 - 2**-8, 3.4e38, torch.inf, -torch.inf, torch.nan, 0.0])
    values[: len(ties)] = ties
    out = torch.empty(4096, dtype=torch.bfloat16)
    _round_kernel[(1,)](values, out, size=4096)
    torch.testing.assert_close(out, values.bfloat16(), equal_nan=True, rtol=0, atol=0)
