"""Linear layers of the fast decoder: weights packed once for the CPU, or plain ones.

Packing (oneDNN, through torch's own operators) makes a CPU layer 1.1 to 2.4 times as fast. In float32 it also makes a
row's result independent of how many rows are computed with it, as long as the sum over the inputs is not split
differently; so wide inputs are cut into slices of at most 1024. Greedy tokens then do not depend on batch mates.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F  # noqa: N812

if TYPE_CHECKING:
    from collections.abc import Sequence

logger = logging.getLogger(__name__)

_MAX_SLICE = 1024  # inputs; measured: up to here one row's sum is the same for every number of rows
_PACKED_DTYPES = (torch.float32, torch.bfloat16)
_CHECKED_ROWS = 3


class Linear:
    """y = x W^T + b for 2-D x. `pack=True` asks for packed weights and falls back to plain ones where they fail."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, *, pack: bool = True) -> None:
        self._bias = bias
        self._weight: torch.Tensor | None = weight  # [N, K]; dropped when packed
        self._packed: list[torch.Tensor] = []
        self._widths: list[int] = []
        if pack and _can_pack(weight):
            self._pack(weight)

    @property
    def is_packed(self) -> bool:
        """Whether the packed weights are in use."""
        return self._weight is None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self._weight is not None:
            return F.linear(x, self._weight, self._bias)
        return self._run_packed(x)

    def _run_packed(self, x: torch.Tensor) -> torch.Tensor:
        parts = _slices(x, self._widths)
        ops = torch.ops.mkldnn
        result: torch.Tensor = ops._linear_pointwise(parts[0], self._packed[0], self._bias, "none", [], "")
        for part, packed in zip(parts[1:], self._packed[1:], strict=True):
            result = ops._linear_pointwise.binary(part, result, packed, None, "add")
        return result

    def _pack(self, weight: torch.Tensor) -> None:
        """Pack, then compare a few rows with the plain layer: the operators are private to torch and may change."""
        probe = torch.linspace(-1, 1, _CHECKED_ROWS * weight.shape[1]).view(_CHECKED_ROWS, -1).to(weight.dtype)
        try:
            self._widths = _slice_widths(weight)
            slices = [part.contiguous() for part in _slices(weight, self._widths)]
            self._packed = [torch.ops.mkldnn._reorder_linear_weight(part, 32) for part in slices]
            good = _agrees(self._run_packed(probe), F.linear(probe, weight, self._bias))
        except RuntimeError as error:
            logger.info("packed linear layers do not run here (%s); plain ones are used", error)
            good = False
        if good:
            self._weight = None
        else:
            self._packed, self._widths = [], []


def fuse(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Stack the weights (or biases) of layers that share their input."""
    return torch.cat(tuple(weights), 0)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or weight.dtype not in _PACKED_DTYPES:
        return False
    ops = torch.ops.mkldnn
    return (
        bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
        and hasattr(ops, "_reorder_linear_weight")
        and hasattr(ops, "_linear_pointwise")
    )


def _slice_widths(weight: torch.Tensor) -> list[int]:
    """Even widths that sum to K. Only float32 is cut: bfloat16 would round between the slices."""
    inputs = weight.shape[1]
    if weight.dtype != torch.float32:
        return [inputs]
    count = -(-inputs // _MAX_SLICE)
    return [inputs // count + (index < inputs % count) for index in range(count)]


def _slices(matrix: torch.Tensor, widths: Sequence[int]) -> list[torch.Tensor]:
    """Cut the columns of `matrix` into parts of `widths`."""
    if len(widths) == 1:
        return [matrix]
    starts = [sum(widths[:index]) for index in range(len(widths))]
    return [matrix.narrow(1, start, width) for start, width in zip(starts, widths, strict=True)]


def _agrees(packed: torch.Tensor, plain: torch.Tensor) -> bool:
    limit = 1e-4 if plain.dtype == torch.float32 else 3e-2
    scale = plain.abs().max().clamp_min(1e-6)
    return bool(((packed - plain).abs().max() / scale) <= limit)
