"""Attention in float64, one row and one head at a time's worth of meaning, and batches to compare on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tokenyard.interfaces import AttentionBatch, AttentionLayer


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A step over a paged cache that already holds each sequence's past, with NaN wherever no token was written."""

    batch: AttentionBatch
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: tuple[torch.Tensor, torch.Tensor]
    keys: list[torch.Tensor]  # per sequence [length, HK, D], past and new
    values: list[torch.Tensor]


def make_case(
    *,
    lengths: list[tuple[int, int]],  # (query length, context length) per sequence
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int | None = None,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> Case:
    """Random K/V in shuffled blocks; unused blocks, unwritten slots and table tails are poisoned."""
    random = torch.Generator().manual_seed(seed)
    v_head_dim = head_dim if v_head_dim is None else v_head_dim

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random).to(dtype)

    counts = [-(-context // block_size) for _, context in lengths]
    num_blocks = sum(counts) + 3
    order = torch.randperm(num_blocks, generator=random).tolist()
    shape = (num_blocks, block_size, num_kv_heads)
    cache = (
        torch.full((*shape, head_dim), torch.nan, dtype=dtype),
        torch.full((*shape, v_head_dim), torch.nan, dtype=dtype),
    )
    table = torch.full((len(lengths), max(counts) + 2), num_blocks - 1 - order[0] % 2, dtype=torch.int32)
    slots, keys, values = [], [], []
    for row, (num_query, context) in enumerate(lengths):
        blocks = [order.pop() for _ in range(counts[row])]
        table[row, : counts[row]] = torch.tensor(blocks)
        slot = torch.tensor([blocks[p // block_size] * block_size + p % block_size for p in range(context)])
        keys.append(normal(context, num_kv_heads, head_dim))
        values.append(normal(context, num_kv_heads, v_head_dim))
        past = slot[: context - num_query]
        for target, source in zip(cache, (keys[-1], values[-1]), strict=True):
            target.flatten(0, 1)[past] = source[: context - num_query]
        slots.append(slot[context - num_query :])
    query_lens = [num_query for num_query, _ in lengths]
    return Case(
        batch=make_batch(query_lens, [context for _, context in lengths], table, torch.cat(slots)),
        query=normal(sum(query_lens), num_heads, head_dim),
        key=torch.cat([key[len(key) - n :] for key, n in zip(keys, query_lens, strict=True)]),
        value=torch.cat([value[len(value) - n :] for value, n in zip(values, query_lens, strict=True)]),
        kv_cache=cache,
        keys=keys,
        values=values,
    )


def make_batch(
    query_lens: list[int], context_lens: list[int], table: torch.Tensor, slots: torch.Tensor
) -> AttentionBatch:
    starts = torch.zeros(len(query_lens) + 1, dtype=torch.int32)
    starts[1:] = torch.tensor(query_lens).cumsum(0)
    return AttentionBatch(
        query_start_loc=starts,
        seq_lens=torch.tensor(context_lens, dtype=torch.int32),
        block_table=table,
        slot_mapping=slots,
        query_lens=query_lens,
        context_lens=context_lens,
        max_query_len=max(query_lens),
        max_seq_len=max(context_lens),
    )


def reference(case: Case, layer: AttentionLayer) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, DV] and log denominators [T, H], in float64."""
    outputs, logs, row = [], [], 0
    for index, num_query in enumerate(case.batch.query_lens):
        key, value = case.keys[index].double(), case.values[index].double()
        for position in range(len(key) - num_query, len(key)):
            first = 0 if layer.sliding_window is None else max(0, position - layer.sliding_window + 1)
            output, log = _attend_row(
                case.query[row].double(), key[first : position + 1], value[first : position + 1], layer
            )
            outputs.append(output)
            logs.append(log)
            row += 1
    return torch.stack(outputs), torch.stack(logs)


def _attend_row(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layer: AttentionLayer
) -> tuple[torch.Tensor, torch.Tensor]:
    group = query.shape[0] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scores = torch.einsum("hd,lhd->hl", query, key) * layer.scale
    if layer.soft_cap is not None:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    if layer.sinks is not None:
        scores = torch.cat((scores, layer.sinks.double()[:, None]), 1)
    weights = scores.softmax(1)[:, : len(key)]
    return torch.einsum("hl,lhd->hd", weights, value), scores.logsumexp(1)
