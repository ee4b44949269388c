"""bfloat16 in Triton's interpreter, which keeps it as bit patterns and multiplies those as integers.

`install` mends what kernels need that do all arithmetic in float32: products of bfloat16 tiles, and rounding to
bfloat16 to the nearest, ties to even, as a GPU does it. The rest of the interpreter is as it was.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import triton.language as tl
from numpy.typing import NDArray
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def install() -> None:
    """Mend this process's interpreter; once is enough, twice does no harm."""
    InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl = _dot, _cast


STOCK_DOT, _STOCK_CAST = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl


def _dot(builder: InterpreterBuilder, left: TensorHandle, right: TensorHandle, *rest: Any) -> TensorHandle:
    return STOCK_DOT(builder, _widened(left), _widened(right), *rest)


def _cast(builder: InterpreterBuilder, source: TensorHandle, target: tl.dtype) -> TensorHandle:
    if source.dtype.scalar == tl.float32 and target.scalar == tl.bfloat16:
        return TensorHandle(_rounded(source.data), tl.bfloat16)
    return _STOCK_CAST(builder, source, target)


def _widened(handle: TensorHandle) -> TensorHandle:
    """bfloat16 bits as the float32 numbers that they stand for."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 numbers as bfloat16 bits, rounded to the nearest, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    nearest = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), nearest).astype(np.uint16)
