"""Blocks of quantised numbers in float64, bit by bit from the formats' definitions: independent of product and gguf."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np

Block: TypeAlias = "np.ndarray[tuple[int], np.dtype[np.uint8]]"


def reference(type_name: str, block: Block) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    """All numbers of one block."""
    bits = _Bits(block)
    decode = {
        "Q8_0": lambda i: bits.half(0) * bits.signed(2 + i),
        "Q4_0": lambda i: bits.half(0) * (bits.small(i, 2) - 8),
        "Q4_1": lambda i: bits.half(0) * bits.small(i, 4) + bits.half(2),
        "Q5_0": lambda i: bits.half(0) * (bits.small(i, 6) + bits.fifth(i, 2) - 16),
        "Q5_1": lambda i: bits.half(0) * (bits.small(i, 8) + bits.fifth(i, 4)) + bits.half(2),
        "Q4_K": lambda i: bits.scaled(i, bits.shared(i, 16)),
        "Q5_K": lambda i: bits.scaled(i, bits.shared(i, 48) + 16 * bits.number(16 + i % 32, [i // 32])),
        "Q6_K": bits.six,
    }[type_name]
    return np.array([decode(index) for index in range(256 if type_name.endswith("_K") else 32)])


class _Bits:
    def __init__(self, block: Block) -> None:
        self._block = block
        self._bits = np.unpackbits(block, bitorder="little")

    def number(self, at: int, places: list[int]) -> int:
        """The bits at these places of the byte `at`, lowest first."""
        return sum(int(self._bits[8 * at + place]) << weight for weight, place in enumerate(places))

    def half(self, at: int) -> float:
        return float(self._block[at : at + 2].view(np.float16)[0])

    def signed(self, at: int) -> int:
        return int(self._block[at : at + 1].view(np.int8)[0])

    def small(self, index: int, at: int) -> int:
        """4 bits: the low halves of 16 bytes, then the high ones."""
        return self.number(at + index % 16, [4 * (index // 16) + bit for bit in range(4)])

    def fifth(self, index: int, at: int) -> int:
        return self.number(at + index // 8, [index % 8]) * 16

    def shared(self, index: int, at: int) -> int:
        """4 bits: 64 numbers share 32 bytes."""
        return self.number(at + index // 64 * 32 + index % 32, [4 * (index // 32 % 2) + bit for bit in range(4)])

    def scaled(self, index: int, digits: int) -> float:
        """A number of Q4_K or Q5_K with the scale and the minimum of its run."""
        run, at, low, high = index // 32, 4, list(range(4)), [6, 7]
        if run < 4:
            scale, least = (self.number(at + run + offset, list(range(6))) for offset in (0, 4))
        else:
            scale = self.number(at + run + 4, low) + 16 * self.number(at + run - 4, high)
            least = self.number(at + run + 4, [4, 5, 6, 7]) + 16 * self.number(at + run, high)
        return self.half(0) * scale * digits - self.half(2) * least

    def six(self, index: int) -> float:
        part, within = divmod(index, 128)
        low = self.number(64 * part + within % 64, [4 * (within // 64) + bit for bit in range(4)])
        high = self.number(128 + 32 * part + within % 32, [2 * (within // 32), 2 * (within // 32) + 1])
        return self.half(208) * self.signed(192 + index // 16) * (low + 16 * high - 32)
