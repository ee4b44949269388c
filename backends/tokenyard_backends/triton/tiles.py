"""How much of the work one program does: a table instead of measurements at every start.

Each entry was chosen among those that spill no registers (in float32: hardly any) and fit into the shared memory of the
chips that it is for, by counting: decoding programs enough on a multiprocessor that reads of K and V are under way all
the time, and as many query rows in a prompt's program as registers allow. None was timed.
"""

from __future__ import annotations

from typing import NamedTuple


class Tile(NamedTuple):
    """Of one attention program."""

    rows: int  # of queries: tokens times heads of one KV head's group
    keys: int  # K/V tokens of one turn of the loop
    num_warps: int
    num_stages: int  # 3: the next block ids, K and V are on their way meanwhile; 2: only K and V


class Tiles(NamedTuple):
    """Of one model on one chip."""

    decode: Tile
    prompt: Tile


_SIXTEEN_BITS = {  # by the greater head size, rounded up to a power of two
    32: Tiles(Tile(16, 64, 4, 3), Tile(128, 32, 8, 3)),
    64: Tiles(Tile(16, 64, 4, 3), Tile(128, 64, 8, 3)),
    128: Tiles(Tile(16, 32, 4, 3), Tile(128, 32, 8, 2)),
    256: Tiles(Tile(16, 32, 8, 2), Tile(64, 32, 8, 2)),
}
_HOPPER_SIXTEEN_BITS = {  # more shared memory, and products whose second factor is read from there
    **_SIXTEEN_BITS,
    128: Tiles(Tile(16, 32, 4, 3), Tile(128, 64, 8, 3)),
    256: Tiles(Tile(16, 32, 8, 2), Tile(64, 32, 8, 3)),
}
_FLOAT32 = {  # multiplied without tensor cores, which would round to TF32
    32: Tiles(Tile(16, 16, 4, 2), Tile(64, 16, 8, 2)),
    64: Tiles(Tile(16, 16, 4, 2), Tile(64, 16, 8, 2)),
    128: Tiles(Tile(16, 16, 4, 2), Tile(32, 16, 8, 2)),
    256: Tiles(Tile(16, 16, 8, 2), Tile(32, 16, 8, 2)),
}
_BIG_MEMORY = (9, 10)  # compute capabilities with 227 KiB of shared memory a program; others have 99 KiB or more


def tiles_for(capability: tuple[int, int], dtype: str, head_dim: int, v_head_dim: int) -> Tiles:
    """The tiles for a GPU of this compute capability."""
    sixteen_bits = _HOPPER_SIXTEEN_BITS if capability[0] in _BIG_MEMORY else _SIXTEEN_BITS
    table = _FLOAT32 if dtype == "float32" else sixteen_bits
    return table[max(32, padded(head_dim), padded(v_head_dim))]


def padded(size: int) -> int:
    """A tile's side: a power of two, and at least 16, which is what tensor cores multiply."""
    return max(16, 1 << (size - 1).bit_length())
