"""The running softmax that both attention kernels share: what one program does with the keys that it walks over.

FlashAttention's (Dao et al., 2022), in base 2. The query heads that share a KV head are rows of one tile. `None` for an
optional pointer or number compiles a kernel without what it stands for.

Legend: M = rows of a query tile, D / DV = head size of keys / values, HK = KV heads. Caches are
[blocks, BLOCK_SIZE, HK, D or DV], contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

LN_2 = tl.constexpr(0.6931471805599453)
_LOG2_E = tl.constexpr(1.4426950408889634)
# Where a row's highest score begins: finite, so that a tile which a row sees nothing of gives no NaN (inf - inf).
_LOWEST = tl.constexpr(-3.0e38)
_NEAR_ZERO = tl.constexpr(0.0625)


@triton.jit
def _tanh(x):
    """Without libdevice; near zero from its series, where the other form loses its leading digits."""
    size = tl.abs(x)
    decay = tl.exp2(size * (-2.0 * _LOG2_E))
    far = (1.0 - decay) / (1.0 + decay)
    square = x * x
    near = size * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0)))
    result = tl.where(size < _NEAR_ZERO, near, far)
    return tl.where(x < 0, -result, result)


@triton.jit
def attend(
    weighted,  # [M, TILE_DV] sum of values so far, weighted relative to `highest`
    highest,  # [M] highest score so far, in base 2
    total,  # [M] sum of weights so far
    query,  # [M, TILE_D]
    positions,  # [M] of the query rows
    low,  # keys low : high
    high,
    table,  # of this sequence
    key_cache,
    value_cache,
    kv_head,
    window,
    scale,
    soft_cap,
    HAS_HIDDEN: tl.constexpr,  # some row does not see some of these keys; else all see all, in whole tiles
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    """The running softmax over some keys of one sequence and KV head: (weighted, highest, total) after them.

    Only keys within low : high are read, and of a hidden tile each row counts only what it sees.
    """
    dims, value_dims = tl.arange(0, TILE_D), tl.arange(0, TILE_DV)
    for start in tl.range(low, high, KEYS):
        keys = start + tl.arange(0, KEYS)
        if HAS_HIDDEN:
            written = keys < high
            blocks = tl.load(table + keys // BLOCK_SIZE, mask=written, other=0)
        else:
            blocks = tl.load(table + keys // BLOCK_SIZE)
        rows = ((blocks.to(tl.int64) * BLOCK_SIZE + keys % BLOCK_SIZE) * HK + kv_head)[:, None]
        key_places, value_places = key_cache + rows * D + dims[None, :], value_cache + rows * DV + value_dims[None, :]
        if HAS_HIDDEN:
            key = tl.load(key_places, mask=written[:, None] & (dims < D)[None, :], other=0.0)
            value = tl.load(value_places, mask=written[:, None] & (value_dims < DV)[None, :], other=0.0)
        else:
            key = tl.load(key_places) if D == TILE_D else tl.load(key_places, mask=(dims < D)[None, :], other=0.0)
            value = (
                tl.load(value_places)
                if DV == TILE_DV
                else tl.load(value_places, mask=(value_dims < DV)[None, :], other=0.0)
            )
        scores = tl.dot(query, tl.trans(key), input_precision="ieee")  # [M, KEYS]
        if soft_cap is None:
            scores = scores * (scale * _LOG2_E)
        else:
            scores = _tanh(scores * (scale / soft_cap)) * (soft_cap * _LOG2_E)
        if HAS_HIDDEN:
            seen = written[None, :] & (keys[None, :] <= positions[:, None])
            if window is not None:
                seen = seen & (keys[None, :] > positions[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        decay = tl.exp2(highest - new_highest)
        weights = tl.exp2(scores - new_highest[:, None])
        total = total * decay + tl.sum(weights, 1)
        weighted = tl.dot(weights.to(value.dtype), value, weighted * decay[:, None], input_precision="ieee")
        highest = new_highest
    return weighted, highest, total


@triton.jit
def start_with_sinks(sinks, heads, has_sink):
    """(highest, total) before any key: nothing, or a head's sink, which weighs but adds no value."""
    highest = tl.full(heads.shape, _LOWEST, tl.float32)
    total = tl.zeros(heads.shape, tl.float32)
    if sinks is not None:
        logits = tl.load(sinks + heads, mask=has_sink, other=float("-inf")).to(tl.float32) * _LOG2_E
        highest = tl.maximum(highest, logits)
        total = tl.exp2(logits - highest)
    return highest, total


@triton.jit
def split_size(num_keys, MIN_SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, KEYS: tl.constexpr):
    """Keys of one split of a row that sees `num_keys`: whole tiles, and at most MAX_SPLITS of them."""
    return tl.maximum(MIN_SPLIT, tl.cdiv(tl.cdiv(num_keys, MAX_SPLITS), KEYS) * KEYS)
