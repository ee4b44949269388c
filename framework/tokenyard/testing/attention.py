"""Steps over a paged K/V cache for tests of attention backends, and what they must give: attention in float64.

A case has its cache in the NHD layout, [blocks, block size, KV heads, head size] for K and V apart, with the past of
each sequence in it and NaN in every slot that no token was written to. A backend with another layout is filled through
its own `forward`; `AttentionBackendContract` does that with every backend.

Legend: N = sequences, T = tokens of the step, H / HK = query / KV heads, G = H / HK, D / DV = head size of keys /
values, Q = query rows of a sequence, L = its K/V rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import numpy as np
import torch

from tokenyard.interfaces.attention import AttentionBatch, AttentionLayer

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray, LongArray

Lengths: TypeAlias = "Sequence[tuple[int, int]]"
Cache: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"

NO_BLOCKS = (-1, np.iinfo(np.int32).max, np.iinfo(np.int32).min)
"""Ids that no cache has, for the tails of block tables."""

_SCORE_LIMIT = 4 * torch.finfo(torch.float32).eps
_SPARE_BLOCKS = 3  # block 0, which belongs to nobody, and two more


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionCase:
    """A step over a paged cache that holds each sequence's past already."""

    batch: AttentionBatch
    query: torch.Tensor  # [T, H, D]
    key: torch.Tensor  # [T, HK, D]
    value: torch.Tensor  # [T, HK, DV]
    kv_cache: Cache  # NHD; NaN where no token was written
    keys: list[torch.Tensor]  # per sequence [L, HK, D], past and new
    values: list[torch.Tensor]  # per sequence [L, HK, DV]


class Expected(NamedTuple):
    """What a backend must give, in float64, and by how much each number may differ from it."""

    out: torch.Tensor  # [T, H, DV]
    lse: torch.Tensor  # [T, H] natural logarithms of the denominators
    out_limit: torch.Tensor  # [T, H, DV]
    lse_limit: torch.Tensor  # [T, H]


def make_case(
    *,
    lengths: Lengths,  # (query length, K/V length with them) per sequence
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: torch.device | str = "cpu",
    fused: bool = False,
    tail: Sequence[int] = NO_BLOCKS,
) -> AttentionCase:
    """Random rows in shuffled blocks, the same for the same arguments. Block 0 and two others belong to nobody.

    `tail` is what stands behind each sequence's blocks in the table; by default ids that no cache has. With `fused`,
    the rows of query, key and value are views of one tensor, as a fused projection gives them.
    """
    random = torch.Generator().manual_seed(seed)

    def normal(rows: int, heads: int, size: int | None) -> torch.Tensor:
        return torch.randn(rows, heads, size or head_dim, generator=random).to(dtype)

    past_and_new = [[normal(length, num_kv_heads, size) for _, length in lengths] for size in (head_dim, v_head_dim)]
    query = normal(sum(count for count, _ in lengths), num_heads, head_dim)
    new = [
        torch.cat([rows[len(rows) - count :] for rows, (count, _) in zip(each, lengths, strict=True)])
        for each in past_and_new
    ]
    tables, num_blocks = random_tables([length for _, length in lengths], block_size, seed)
    key_cache, value_cache = (_filled(rows, lengths, tables, num_blocks, block_size) for rows in past_and_new)
    step = [rows.to(device) for rows in (query, *new)]
    query, key, value = fused_rows(*step) if fused else step
    keys, values = ([rows.to(device) for rows in each] for each in past_and_new)
    return AttentionCase(
        batch=make_batch(lengths, tables, block_size, device=device, tail=tail),
        query=query,
        key=key,
        value=value,
        kv_cache=(key_cache.to(device), value_cache.to(device)),
        keys=keys,
        values=values,
    )


def random_tables(lengths: Sequence[int], block_size: int, seed: int = 0) -> tuple[list[list[int]], int]:
    """Blocks of each sequence, in no order and shared by none, and how many blocks the cache must have."""
    counts = [-(-length // block_size) for length in lengths]
    num_blocks = sum(counts) + _SPARE_BLOCKS
    order = (torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1).tolist()
    return [[order.pop() for _ in range(count)] for count in counts], num_blocks


def make_batch(
    lengths: Lengths,  # (query length, K/V length with them) per sequence
    tables: Sequence[Sequence[int]],  # blocks of each sequence
    block_size: int,
    *,
    device: torch.device | str = "cpu",
    tail: Sequence[int] = NO_BLOCKS,
    width: int | None = None,
) -> AttentionBatch:
    """A step's metadata as a runner makes it, but with `tail` behind the blocks of each table.

    `width`: columns of the table; None = two more than the longest one needs.
    """
    query_lens, context_lens = [count for count, _ in lengths], [length for _, length in lengths]
    table = padded_table(tables, max(map(len, tables)) + 2 if width is None else width, tail)
    starts = np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32)
    slots = [
        slot_mapping(blocks, block_size, length - count, length)
        for blocks, (count, length) in zip(tables, lengths, strict=True)
    ]
    return AttentionBatch(
        query_start_loc=torch.from_numpy(starts).to(device),
        seq_lens=torch.tensor(context_lens, dtype=torch.int32, device=device),
        block_table=torch.tensor(table, device=device),
        slot_mapping=torch.from_numpy(np.concatenate(slots)).to(device),
        query_lens=query_lens,
        context_lens=context_lens,
        max_query_len=max(query_lens),
        max_seq_len=max(context_lens),
        host_block_table=table,
    )


def slot_mapping(blocks: Sequence[int], block_size: int, start: int, end: int) -> LongArray:
    """[end - start] the cache slots of a sequence's positions."""
    positions = np.arange(start, end, dtype=np.int64)
    return np.asarray(blocks, dtype=np.int64)[positions // block_size] * block_size + positions % block_size


def padded_table(tables: Sequence[Sequence[int]], width: int, tail: Sequence[int] = NO_BLOCKS) -> IntArray:
    """[N, width] int32 with `tail`, over and over, behind the blocks of each sequence."""
    padded = np.empty((len(tables), width), dtype=np.int32)
    for row, blocks in zip(padded, tables, strict=True):
        row[: len(blocks)] = blocks
        row[len(blocks) :] = np.resize(tail, width - len(blocks))
    return padded


def tables_of(batch: AttentionBatch, block_size: int) -> list[list[int]]:
    """The blocks of each sequence, without the tails of the table."""
    rows = batch.block_table.tolist()
    return [row[: -(-length // block_size)] for row, length in zip(rows, batch.context_lens, strict=True)]


def alone(case: AttentionCase, index: int, *, tail: Sequence[int] = NO_BLOCKS) -> AttentionCase:
    """Sequence `index` as a step of its own, over the same cache."""
    block_size = case.kv_cache[0].shape[1]
    start, count = sum(case.batch.query_lens[:index]), case.batch.query_lens[index]
    rows = slice(start, start + count)
    return replace(
        case,
        batch=make_batch(
            [(count, case.batch.context_lens[index])],
            [tables_of(case.batch, block_size)[index]],
            block_size,
            device=case.query.device,
            tail=tail,
        ),
        query=case.query[rows],
        key=case.key[rows],
        value=case.value[rows],
        keys=[case.keys[index]],
        values=[case.values[index]],
    )


def fused_rows(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Sequence[torch.Tensor]:
    """The same rows as views of one tensor [T, everything], as a fused projection gives them."""
    parts = (query, key, value)
    fused = torch.cat([part.flatten(1) for part in parts], 1)
    views = torch.split(fused, [part[0].numel() for part in parts], 1)
    return [view.view(part.shape) for view, part in zip(views, parts, strict=True)]


def _filled(
    rows: Sequence[torch.Tensor],
    lengths: Lengths,
    tables: Sequence[Sequence[int]],
    num_blocks: int,
    block_size: int,
) -> torch.Tensor:
    """An NHD cache with the past of each sequence, NaN elsewhere."""
    cache = torch.full((num_blocks * block_size, *rows[0].shape[1:]), torch.nan, dtype=rows[0].dtype)
    for each, (count, length), blocks in zip(rows, lengths, tables, strict=True):
        past = length - count
        cache[torch.from_numpy(slot_mapping(blocks, block_size, 0, past))] = each[:past]
    return cache.view(num_blocks, block_size, *cache.shape[1:])


def reference(case: AttentionCase, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, DV] and logarithms of the denominators [T, H], in float64."""
    found = expect_attention(case, layer)
    return found.out, found.lse


def expect_attention(case: AttentionCase, layer: AttentionLayer, *, causal: bool = True) -> Expected:
    """The reference, and by how much rounding may move each number.

    A score may be off by 4 eps32 (1 + |q| |k| scale + soft cap): sums and exponentials are in float32. In a type of 16
    bits the scaled query may be rounded too: half an eps of the greatest score of the row. An output moves by twice
    that and by 2 eps of its own type, times the same weighted mean of |value|; a log-sum-exp by the score's limit.
    """
    rows = pairwise(np.cumsum([0, *case.batch.query_lens]).tolist())
    found = [
        _attend(case.query[low:high], key, value, layer, causal)
        for (low, high), key, value in zip(rows, case.keys, case.values, strict=True)
    ]
    return Expected(*(torch.cat(parts) for parts in zip(*found, strict=True)))


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: AttentionLayer, causal: bool
) -> Expected:
    """One sequence: its query rows are the last of its L positions."""
    dtype, shape = query.dtype, query.shape
    query, key, value = query.double(), key.double(), value.double()
    grouped = query.view(shape[0], key.shape[1], -1, shape[2])  # [Q, HK, G, D]: head h reads KV head h // G
    scores = torch.einsum("qkgd,lkd->qkgl", grouped, key).flatten(1, 2) * layer.scale  # [Q, H, L]
    hidden = _hidden(len(query), len(key), layer.sliding_window, causal).to(query.device)
    norms = torch.einsum("qkg,lk->qkgl", grouped.norm(dim=-1), key.norm(dim=-1)).flatten(1, 2) * abs(layer.scale)
    score_limit = _score_limit(scores.masked_fill(hidden, 0), norms.masked_fill(hidden, 0), layer.soft_cap, dtype)
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    scores = scores.masked_fill(hidden, -math.inf)
    sinks = [] if layer.sinks is None else [layer.sinks.double().view(1, -1, 1).expand(len(scores), -1, 1)]
    lse = torch.cat((scores, *sinks), 2).logsumexp(2)
    weights = (scores - lse[..., None]).exp().view(*grouped.shape[:3], -1)  # [Q, HK, G, L]

    def weighted(rows: torch.Tensor) -> torch.Tensor:
        return torch.einsum("qkgl,lkd->qkgd", weights, rows).reshape(*shape[:2], -1)

    info = torch.finfo(dtype)
    out_limit = 2 * (score_limit[..., None] + info.eps) * weighted(value.abs()) + info.smallest_normal * info.eps
    return Expected(weighted(value), lse, out_limit, score_limit + _SCORE_LIMIT * (1 + lse.abs()))


def _score_limit(scores: torch.Tensor, norms: torch.Tensor, soft_cap: float | None, dtype: torch.dtype) -> torch.Tensor:
    """[Q, H] by how much any score of a row may be off."""
    limit = _SCORE_LIMIT * (1 + norms.amax(2) + (0.0 if soft_cap is None else soft_cap))
    return limit if dtype == torch.float32 else limit + torch.finfo(dtype).eps / 2 * scores.abs().amax(2)


def _hidden(num_queries: int, length: int, window: int | None, causal: bool) -> torch.Tensor:
    """[Q, 1, L] what a query row does not see."""
    queries = torch.arange(length - num_queries, length)[:, None]
    keys = torch.arange(length)
    hidden = keys > queries if causal else torch.zeros(num_queries, length, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (keys <= queries - window)
    return hidden[:, None]
