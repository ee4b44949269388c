"""Triton kernels of paged attention: K/V rows into the cache, decoding rows, their splits merged, and prompts.

A decoding row's keys are cut into splits, each attended by a program of its own (Flash-Decoding, Dao et al., 2023);
where a split begins depends on the sequence alone, so that its result does not depend on its batch mates.

Rules for what is written here and in `running_softmax`: data types of 16 bits only in loads, in operands of `tl.dot`
and in stores, all arithmetic in float32 (bfloat16 arithmetic is wrong in the interpreter); `input_precision="ieee"`,
else float32 would be multiplied as TF32; no libdevice, no block pointers; offsets into a cache in 64 bits.

Legend: T = tokens of the step, N = sequences, H / HK = query / KV heads, GROUP = H / HK, HEADS = those of a group that
are in one tile, D / DV = head size of keys / values. Caches are [blocks, BLOCK_SIZE, HK, D or DV], contiguous.
"""

from __future__ import annotations

import triton
import triton.language as tl

from tokenyard_backends.triton.running_softmax import LN_2, attend, split_size, start_with_sinks

# What changes from step to step must not make other binaries: not a number, and not where a step's arrays begin.
_METADATA = ["sequences", "tiles", "query_start_loc", "seq_lens", "block_table"]


@triton.jit(do_not_specialize_on_alignment=["slots"])
def write_kv_kernel(
    key,  # [T, HK, D]
    value,  # [T, HK, DV]
    key_cache,
    value_cache,
    slots,  # [T] int64; below 0: the token is not written
    key_stride,  # from token to token
    value_stride,
    HK: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    TILE_HEADS: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    """Grid (T, cdiv(HK, TILE_HEADS)): some heads of one token, to its slot."""
    token = tl.program_id(0).to(tl.int64)
    heads = tl.program_id(1) * TILE_HEADS + tl.arange(0, TILE_HEADS)[:, None]
    slot = tl.load(slots + token)
    if slot < 0:
        return
    dims = tl.arange(0, TILE_D)[None, :]
    places, exists = heads * D + dims, (heads < HK) & (dims < D)
    row = tl.load(key + token * key_stride + places, mask=exists)
    tl.store(key_cache + slot * (HK * D) + places, row, mask=exists)
    dims = tl.arange(0, TILE_DV)[None, :]
    places, exists = heads * DV + dims, (heads < HK) & (dims < DV)
    row = tl.load(value + token * value_stride + places, mask=exists)
    tl.store(value_cache + slot * (HK * DV) + places, row, mask=exists)


@triton.jit(do_not_specialize=["table_stride", "num_splits", "window"], do_not_specialize_on_alignment=_METADATA)
def decode_kernel(
    query,  # [T, H, D]
    key_cache,
    value_cache,
    out,  # [T, H, DV]
    lse,  # [T, H] or None
    split_out,  # [rows, H, num_splits, DV] float32; rows = decoding rows of the step
    split_lse,  # [rows, H, num_splits] float32, in base 2
    sinks,  # [H] or None
    sequences,  # [rows] which sequence each decoding row is of
    query_start_loc,  # [N + 1]
    seq_lens,  # [N]
    block_table,  # [N, table_stride]
    query_stride,  # from token to token
    table_stride,
    num_splits,  # room in split_out and split_lse
    window,  # or None
    scale,
    soft_cap,  # or None
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    """Grid (rows, HK * cdiv(GROUP, HEADS), splits): one split of one row, for some heads of one KV head's group.

    A row with one split is finished here. A program beyond the row's splits does nothing, so that a grid may be larger
    than a step needs.
    """
    decoding, split = tl.program_id(0), tl.program_id(2)
    sequence = tl.load(sequences + decoding).to(tl.int64)
    position = tl.load(seq_lens + sequence) - 1
    first = 0
    if window is not None:
        first = tl.maximum(position - window + 1, 0)
    num_keys = position + 1 - first
    if split * MIN_SPLIT >= num_keys:  # no split is smaller
        return
    size = split_size(num_keys, MIN_SPLIT, MAX_SPLITS, KEYS)
    if split * size >= num_keys:
        return
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // TILES
    rows = tl.arange(0, ROWS)
    in_group = (tl.program_id(1) % TILES) * HEADS + rows
    exists = (rows < HEADS) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group
    dims, value_dims = tl.arange(0, TILE_D), tl.arange(0, TILE_DV)
    token = tl.load(query_start_loc + sequence).to(tl.int64)
    tile = tl.load(
        query + token * query_stride + heads[:, None] * D + dims[None, :],
        mask=exists[:, None] & (dims < D)[None, :],
        other=0.0,
    )
    highest, total = start_with_sinks(sinks, heads, exists & (rows * 0 + split == 0))  # once a row
    weighted, highest, total = attend(
        tl.zeros([ROWS, TILE_DV], tl.float32),
        highest,
        total,
        tile,
        tl.full([ROWS], 0, tl.int32) + position,
        first + split * size,
        tl.minimum(first + (split + 1) * size, position + 1),
        block_table + sequence * table_stride,
        key_cache,
        value_cache,
        kv_head,
        None,
        scale,
        soft_cap,
        True,
        HK,
        D,
        DV,
        BLOCK_SIZE,
        KEYS,
        TILE_D,
        TILE_DV,
    )
    total = tl.where(exists, total, 1.0)
    result, log = weighted / total[:, None], highest + tl.log2(total)
    stored = exists[:, None] & (value_dims < DV)[None, :]
    if size >= num_keys:
        result_rows = token * (HK * GROUP) + heads
        tl.store(out + result_rows[:, None] * DV + value_dims[None, :], result.to(out.dtype.element_ty), mask=stored)
        if lse is not None:
            tl.store(lse + result_rows, log * LN_2, mask=exists)
    else:
        part = (decoding.to(tl.int64) * (HK * GROUP) + heads) * num_splits + split
        tl.store(split_out + part[:, None] * DV + value_dims[None, :], result, mask=stored)
        tl.store(split_lse + part, log, mask=exists)


@triton.jit(do_not_specialize=["num_splits", "window"], do_not_specialize_on_alignment=_METADATA)
def merge_kernel(
    split_out,
    split_lse,
    out,
    lse,
    sequences,
    query_start_loc,
    seq_lens,
    num_splits,
    window,
    H: tl.constexpr,
    DV: tl.constexpr,
    MIN_SPLIT: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
    KEYS: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    """Grid (rows, H): the splits that `decode_kernel` left, into `out` and `lse`, weighted by their shares."""
    decoding, head = tl.program_id(0), tl.program_id(1)
    sequence = tl.load(sequences + decoding).to(tl.int64)
    num_keys = tl.load(seq_lens + sequence)
    if window is not None:
        num_keys = tl.minimum(num_keys, window)
    if num_keys <= MIN_SPLIT:
        return
    size = split_size(num_keys, MIN_SPLIT, MAX_SPLITS, KEYS)
    if size >= num_keys:
        return
    splits, value_dims = tl.arange(0, MAX_SPLITS), tl.arange(0, TILE_DV)
    exists = splits * size < num_keys
    parts = (decoding.to(tl.int64) * H + head) * num_splits + splits
    logs = tl.load(split_lse + parts, mask=exists, other=float("-inf"))
    results = tl.load(
        split_out + parts[:, None] * DV + value_dims[None, :],
        mask=exists[:, None] & (value_dims < DV)[None, :],
        other=0.0,
    )
    highest = tl.max(logs, 0)
    weights = tl.exp2(logs - highest)
    total = tl.sum(weights, 0)
    row = tl.load(query_start_loc + sequence).to(tl.int64) * H + head
    result = tl.sum(results * weights[:, None], 0) / total
    tl.store(out + row * DV + value_dims, result.to(out.dtype.element_ty), mask=value_dims < DV)
    if lse is not None:
        tl.store(lse + row, (highest + tl.log2(total)) * LN_2)


@triton.jit(do_not_specialize=["table_stride", "window"], do_not_specialize_on_alignment=_METADATA)
def prompt_kernel(
    query,  # [T, H, D]
    key_cache,
    value_cache,
    out,  # [T, H, DV]
    lse,  # [T, H] or None
    sinks,  # [H] or None
    tiles,  # [number of tiles, 2] sequence, and first query row of the sequence's
    query_start_loc,  # [N + 1]
    seq_lens,  # [N]
    block_table,  # [N, table_stride]
    query_stride,  # from token to token
    table_stride,
    window,  # or None
    scale,
    soft_cap,  # or None
    HK: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    D: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    TILE_D: tl.constexpr,
    TILE_DV: tl.constexpr,
):
    """Grid (tiles, HK * cdiv(GROUP, HEADS)): ROWS // HEADS query tokens with some heads of one KV head's group."""
    TILES: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    TOKENS: tl.constexpr = ROWS // HEADS
    sequence = tl.load(tiles + 2 * tl.program_id(0)).to(tl.int64)
    first_token = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1) // TILES
    begin = tl.load(query_start_loc + sequence)
    num_tokens = tl.load(query_start_loc + sequence + 1) - begin
    past = tl.load(seq_lens + sequence) - num_tokens
    rows = tl.arange(0, ROWS)
    tokens = first_token + rows // HEADS
    in_group = (tl.program_id(1) % TILES) * HEADS + rows % HEADS
    exists = (rows < TOKENS * HEADS) & (tokens < num_tokens) & (in_group < GROUP)
    heads = kv_head * GROUP + in_group
    dims, value_dims = tl.arange(0, TILE_D), tl.arange(0, TILE_DV)
    step_tokens = (begin + tokens).to(tl.int64)
    tile = tl.load(
        query + step_tokens[:, None] * query_stride + heads[:, None] * D + dims[None, :],
        mask=exists[:, None] & (dims < D)[None, :],
        other=0.0,
    )
    weighted = tl.zeros([ROWS, TILE_DV], tl.float32)
    highest, total = start_with_sinks(sinks, heads, exists)
    first_position = past + first_token
    table = block_table + sequence * table_stride
    low = 0
    if window is not None:
        low = tl.maximum(first_position - window + 1, 0)
    else:
        seen_by_all = (first_position + 1) // KEYS * KEYS
        weighted, highest, total = attend(
            weighted,
            highest,
            total,
            tile,
            past + tokens,
            0,
            seen_by_all,
            table,
            key_cache,
            value_cache,
            kv_head,
            None,
            scale,
            soft_cap,
            False,
            HK,
            D,
            DV,
            BLOCK_SIZE,
            KEYS,
            TILE_D,
            TILE_DV,
        )
        low = seen_by_all
    weighted, highest, total = attend(
        weighted,
        highest,
        total,
        tile,
        past + tokens,
        low,
        past + tl.minimum(first_token + TOKENS, num_tokens),
        table,
        key_cache,
        value_cache,
        kv_head,
        window,
        scale,
        soft_cap,
        True,
        HK,
        D,
        DV,
        BLOCK_SIZE,
        KEYS,
        TILE_D,
        TILE_DV,
    )
    stored = exists[:, None] & (value_dims < DV)[None, :]
    result_rows = step_tokens * (HK * GROUP) + heads
    total = tl.where(exists, total, 1.0)
    result = weighted / total[:, None]
    tl.store(out + result_rows[:, None] * DV + value_dims[None, :], result.to(out.dtype.element_ty), mask=stored)
    if lse is not None:
        tl.store(lse + result_rows, (highest + tl.log2(total)) * LN_2, mask=exists)
