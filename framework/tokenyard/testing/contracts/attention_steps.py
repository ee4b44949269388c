"""Steps for the rules of AttentionBackendContract, and steps made from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch

from tokenyard.interfaces.attention import AttentionLayer, AttentionSpec
from tokenyard.testing.attention import AttentionCase, Lengths, make_batch, make_case, tables_of

_FILL_TOKENS = 64  # the past is written in prompts of about this length: long ones would take long to attend


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepShape:
    """Sizes of a step; its numbers depend on them and the seed alone."""

    lengths: Lengths  # (query length, K/V length with them) per sequence
    dtype: str
    num_kv_heads: int
    group_size: int
    head_dim: int
    v_head_dim: int
    block_size: int
    seed: int = 0

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.group_size

    @property
    def torch_dtype(self) -> torch.dtype:
        return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[self.dtype]

    def case(self, device: torch.device, *, fused: bool = False, tail: Sequence[int] = (0,)) -> AttentionCase:
        return make_case(
            lengths=self.lengths,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            block_size=self.block_size,
            dtype=self.torch_dtype,
            seed=self.seed,
            device=device,
            fused=fused,
            tail=tail,
        )

    def spec(self, device_type: str, layers: Sequence[AttentionLayer], *, causal: bool = True) -> AttentionSpec:
        """What these layers ask of a backend."""
        return AttentionSpec(
            device_type=device_type,
            dtype=self.dtype,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            v_head_dim=self.v_head_dim,
            block_size=self.block_size,
            causal=causal,
            sliding_windows=frozenset(layer.sliding_window for layer in layers if layer.sliding_window is not None),
            soft_caps=frozenset(layer.soft_cap for layer in layers if layer.soft_cap is not None),
            has_sinks=any(layer.sinks is not None for layer in layers),
        )


def past_of(case: AttentionCase, block_size: int) -> AttentionCase | None:
    """A step that writes the past: short prompts, each beginning at a block, of which none reads another one's."""
    length = block_size * max(1, _FILL_TOKENS // block_size)
    tables, keys, values = tables_of(case.batch, block_size), [], []
    pieces: list[tuple[int, list[int]]] = []
    for index, (count, total) in enumerate(zip(case.batch.query_lens, case.batch.context_lens, strict=True)):
        for start in range(0, total - count, length):
            end = min(start + length, total - count)
            pieces.append((end - start, tables[index][start // block_size : -(-end // block_size)]))
            keys.append(case.keys[index][start:end])
            values.append(case.values[index][start:end])
    if not pieces:
        return None
    lengths = [(count, count) for count, _ in pieces]
    return dataclasses.replace(
        case,
        batch=make_batch(
            lengths, [blocks for _, blocks in pieces], block_size, device=case.batch.block_table.device, tail=(0,)
        ),
        query=case.query.new_zeros(sum(count for count, _ in pieces), *case.query.shape[1:]),
        key=torch.cat(keys),
        value=torch.cat(values),
    )


def part_of(
    world: AttentionCase, block_size: int, spans: Sequence[tuple[int, int, int]], *, tail: Sequence[int] = (0,)
) -> AttentionCase:
    """The step that computes positions start:end of sequences (index, start, end), in that order.

    Every sequence of `world` is a whole prompt, so it has the rows of every position.
    """
    tables, starts = tables_of(world.batch, block_size), np.cumsum([0, *world.batch.query_lens]).tolist()
    rows = torch.cat([torch.arange(starts[index] + low, starts[index] + high) for index, low, high in spans])
    rows = rows.to(world.query.device)
    lengths = [(high - low, high) for _, low, high in spans]
    own = [tables[index][: -(-high // block_size)] for index, _, high in spans]
    return dataclasses.replace(
        world,
        batch=make_batch(lengths, own, block_size, device=world.query.device, tail=tail),
        query=world.query[rows],
        key=world.key[rows],
        value=world.value[rows],
        keys=[world.keys[index][:high] for index, _, high in spans],
        values=[world.values[index][:high] for index, _, high in spans],
    )


def with_tables(
    case: AttentionCase, tables: Sequence[Sequence[int]], block_size: int, *, tail: Sequence[int] = (0,)
) -> AttentionCase:
    """The same step in other blocks."""
    lengths = list(zip(case.batch.query_lens, case.batch.context_lens, strict=True))
    batch = make_batch(lengths, tables, block_size, device=case.query.device, tail=tail)
    return dataclasses.replace(case, batch=batch)


def sharing(case: AttentionCase, block_size: int, num_blocks: int, *, readers_first: bool) -> AttentionCase:
    """A step in which sequence 0, a whole prompt, writes the `num_blocks` blocks that sequence 1 begins with."""
    tables, shared = tables_of(case.batch, block_size), num_blocks * block_size
    tables[1] = tables[0][:num_blocks] + tables[1][num_blocks:]
    keys, values = ([rows[0], torch.cat((rows[0][:shared], rows[1][shared:]))] for rows in (case.keys, case.values))
    writer_first = dataclasses.replace(with_tables(case, tables, block_size), keys=keys, values=values)
    if not readers_first:
        return writer_first
    count = case.batch.query_lens[0]
    rows = torch.cat((torch.arange(count, len(case.query)), torch.arange(count))).to(case.query.device)
    lengths = list(zip(case.batch.query_lens, case.batch.context_lens, strict=True))[::-1]
    return dataclasses.replace(
        writer_first,
        batch=make_batch(lengths, tables[::-1], block_size, device=case.query.device, tail=(0,)),
        query=case.query[rows],
        key=case.key[rows],
        value=case.value[rows],
        keys=keys[::-1],
        values=values[::-1],
    )


def passed(case: AttentionCase, block_size: int, window: int) -> AttentionCase:
    """The same step after the blocks that no row's window reaches were given back: their entries are 0."""
    tables = tables_of(case.batch, block_size)
    for row, count, length in zip(tables, case.batch.query_lens, case.batch.context_lens, strict=True):
        num_passed = max(0, length - count - window + 1) // block_size
        row[:num_passed] = [0] * num_passed
    return with_tables(case, tables, block_size)
