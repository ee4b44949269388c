"""Frames: typed msgspec messages, with numpy arrays as bytes. Nothing that comes in a frame can be code."""

from __future__ import annotations

import functools
import logging
import operator
from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, get_args

import msgspec
import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

logger = logging.getLogger(__name__)

T = TypeVar("T")
ScalarT = TypeVar("ScalarT", bound=np.generic)

Frame = bytes | bytearray | memoryview

TypeName = Literal["int32", "int64", "uint8", "uint64", "float32", "float64", "bool"]

_NAMES: Mapping[np.dtype[np.generic], TypeName] = {np.dtype(name): name for name in get_args(TypeName)}
_MAX_AXES = 8
# What decoding may raise on bytes that nobody of ours sent: a message of another shape, text that is no UTF-8, nesting
# without end, a length that no memory holds.
_UNREADABLE = (msgspec.MsgspecError, ValueError, TypeError, RecursionError, OverflowError, MemoryError)


class Array(msgspec.Struct, frozen=True, array_like=True):
    """A numpy array: C order, this machine's byte order."""

    dtype: TypeName
    shape: tuple[int, ...]
    data: bytes

    @classmethod
    def of(cls, values: NDArray[np.generic]) -> Array:
        """A copy of an array; raises TypeError for a type that does not travel."""
        if values.dtype not in _NAMES:
            raise TypeError(f"an array of {values.dtype} does not travel between processes")
        return cls(_NAMES[values.dtype], values.shape, values.tobytes())

    def values(self, dtype: type[ScalarT], num_axes: int) -> NDArray[ScalarT]:
        """The array, read-only; raises ValueError when it is of another type or shape than wanted, or broken."""
        wanted = np.dtype(dtype)
        if self.dtype != wanted.name or len(self.shape) != num_axes or num_axes > _MAX_AXES:
            raise ValueError(f"an array of {self.dtype}{list(self.shape)}, not of {wanted.name} with {num_axes} axes")
        if any(size < 0 for size in self.shape) or prod(self.shape) * wanted.itemsize != len(self.data):
            raise ValueError(f"an array of {self.dtype}{list(self.shape)} in {len(self.data)} bytes")
        return np.frombuffer(self.data, dtype=wanted).reshape(self.shape)


class Codec(Generic[T]):
    """Messages of these types, which are tagged Structs, to frames and back. For any number of threads."""

    def __init__(self, kinds: Sequence[type[T]]) -> None:
        union: object = functools.reduce(operator.or_, kinds)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(union)
        self.num_dropped = 0  # frames that were no message

    def encode(self, message: T) -> bytes:
        """One frame."""
        return self._encoder.encode(message)

    def decode(self, frame: Frame) -> T | None:
        """The message, or None for a frame that is none of these: it is counted, and nothing else comes of it."""
        try:
            return self._decoder.decode(frame)
        except _UNREADABLE as error:
            self.drop(error)
            return None

    def drop(self, error: Exception) -> None:
        """Count a frame as dropped, for who finds out only later that it is no good; the first one is logged."""
        self.num_dropped += 1
        if self.num_dropped == 1:
            logger.warning("a frame from another process is no message of ours and was dropped: %s", error)
