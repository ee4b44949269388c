"""One block of each quantisation, decoded number by number as its format is defined.

Slow and plain on purpose: what dequantises whole tensors is compared with it whenever a file is loaded.
Numbers are exact: a block's value has fewer bits than a float64.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

_NUMBERS = 32  # of a small block, and of a run in a K block
_SUPER_NUMBERS = 256  # of a K block


def decode_block(type_name: str, block: bytes) -> list[float]:
    """The numbers of one block of a type in BLOCK_DECODERS; `block` has the bytes of exactly one."""
    return BLOCK_DECODERS[type_name](block)


def _q8_0(block: bytes) -> list[float]:
    scale, *numbers = struct.unpack("<e32b", block)
    return [scale * number for number in numbers]


def _q4_0(block: bytes) -> list[float]:
    (scale,) = struct.unpack_from("<e", block)
    return [scale * (number - 8) for number in _nibbles(block[2:])]


def _q4_1(block: bytes) -> list[float]:
    scale, least = struct.unpack_from("<2e", block)
    return [scale * number + least for number in _nibbles(block[4:])]


def _q5_0(block: bytes) -> list[float]:
    scale, fifth_bits = struct.unpack_from("<eI", block)
    return [scale * (number - 16) for number in _five_bits(block[6:], fifth_bits)]


def _q5_1(block: bytes) -> list[float]:
    scale, least, fifth_bits = struct.unpack_from("<2eI", block)
    return [scale * number + least for number in _five_bits(block[8:], fifth_bits)]


def _q4_k(block: bytes) -> list[float]:
    return _k_values(block, [0] * _SUPER_NUMBERS, block[16:])


def _q5_k(block: bytes) -> list[float]:
    fifth = block[16:48]  # byte l has the fifth bits of the numbers l, 32 + l, 64 + l, ...
    high = [fifth[index % _NUMBERS] >> (index // _NUMBERS) & 1 for index in range(_SUPER_NUMBERS)]
    return _k_values(block, high, block[48:])


def _q6_k(block: bytes) -> list[float]:
    low, high = block[:128], block[128:192]
    scales, (scale,) = struct.unpack_from("<16b", block, 192), struct.unpack_from("<e", block, 208)
    values = []
    for index in range(_SUPER_NUMBERS):
        half, within = divmod(index, 128)
        quarter, place = divmod(within, 32)
        four_bits = low[half * 64 + quarter % 2 * 32 + place] >> (quarter // 2 * 4) & 15
        two_bits = high[half * 32 + place] >> (quarter * 2) & 3
        values.append(scale * scales[index // 16] * ((four_bits | two_bits << 4) - 32))
    return values


def _nibbles(packed: bytes) -> list[int]:
    """The low halves of all bytes, then the high ones."""
    return [byte & 15 for byte in packed] + [byte >> 4 for byte in packed]


def _five_bits(packed: bytes, fifth_bits: int) -> list[int]:
    return [number | (fifth_bits >> index & 1) << 4 for index, number in enumerate(_nibbles(packed))]


def _k_values(block: bytes, fifth_bits: list[int], packed: bytes) -> list[float]:
    """Q4_K and Q5_K: eight runs of 32 numbers, each with a 6-bit scale and a 6-bit minimum."""
    scale, least = struct.unpack_from("<2e", block)
    values = []
    for index in range(_SUPER_NUMBERS):
        run, place = divmod(index, _NUMBERS)
        number = packed[run // 2 * _NUMBERS + place] >> (run % 2 * 4) & 15
        run_scale, run_least = _six_bits(block[4:16], run)
        values.append(scale * run_scale * (number | fifth_bits[index] << 4) - least * run_least)
    return values


def _six_bits(packed: bytes, run: int) -> tuple[int, int]:
    """Scale and minimum of one run: the upper four runs keep their highest bits in the bytes of the lower ones."""
    if run < 4:
        return packed[run] & 63, packed[run + 4] & 63
    both = packed[run + 4]
    return both & 15 | packed[run - 4] >> 6 << 4, both >> 4 | packed[run] >> 6 << 4


BLOCK_DECODERS: Mapping[str, Callable[[bytes], list[float]]] = {
    "Q8_0": _q8_0,
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
