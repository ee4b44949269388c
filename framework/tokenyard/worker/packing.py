"""Packing: several arrays in one buffer of bytes, so that they cross between host and device in one copy."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_ALIGNMENT = 256  # bytes; what kernels may assume of a tensor's address
_DTYPES: Mapping[np.dtype, torch.dtype] = {
    np.dtype(np.int32): torch.int32,
    np.dtype(np.int64): torch.int64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.float64): torch.float64,
}
_NUMPY_DTYPES: Mapping[torch.dtype, np.dtype] = {kept: named for named, kept in _DTYPES.items()}


class _Place(NamedTuple):
    start: int  # byte
    dtype: np.dtype
    shape: tuple[int, ...]

    @property
    def end(self) -> int:
        return self.start + int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class Packing:
    """Where arrays of given types and shapes lie in a buffer, each at an address of its own alignment."""

    def __init__(self, fields: Sequence[tuple[np.dtype, tuple[int, ...]]]) -> None:
        self._places: list[_Place] = []
        end = 0
        for dtype, shape in fields:
            place = _Place(-(-end // _ALIGNMENT) * _ALIGNMENT, dtype, shape)
            self._places.append(place)
            end = place.end
        self.num_bytes = end

    @classmethod
    def of(cls, values: Sequence[np.ndarray] | Sequence[torch.Tensor]) -> Packing:
        """For values like these: int32, int64, float32 or float64."""
        return cls([(_dtype_of(value), tuple(value.shape)) for value in values])

    def arrays(self, buffer: torch.Tensor) -> list[np.ndarray]:
        """Views of a buffer [num_bytes] uint8 in the host's memory."""
        memory = buffer.numpy()
        return [memory[place.start : place.end].view(place.dtype).reshape(place.shape) for place in self._places]

    def tensors(self, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Views of a buffer [num_bytes] uint8 on any device."""
        return [buffer[place.start : place.end].view(_DTYPES[place.dtype]).view(place.shape) for place in self._places]


def _dtype_of(value: np.ndarray | torch.Tensor) -> np.dtype:
    if isinstance(value, torch.Tensor):
        return _NUMPY_DTYPES[value.dtype]
    dtype: np.dtype = value.dtype
    return dtype
