"""The tensors of an attention benchmark: one step over a paged cache, what was written before it, what must come out.

Legend: N = sequences, C = tokens of each, T = query rows of the step, H / HK = query / KV heads, D = head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenyard.interfaces.attention import AttentionBatch

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.bench.attention_shapes import AttentionShape
    from tokenyard.interfaces.attention import AttentionLayer, AttentionSpec

_PAST_CHUNK = 4096  # tokens that are written in one step
_SAMPLED_ROWS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionInputs:
    """A step of `shape`, in shuffled blocks; block 0 belongs to nobody, as in an engine."""

    shape: AttentionShape
    block_size: int
    batch: AttentionBatch
    query: torch.Tensor  # [T, H, D]
    keys: torch.Tensor  # [N, C, HK, D] of all tokens
    values: torch.Tensor  # [N, C, HK, D]
    num_blocks: int

    @property
    def new_key(self) -> torch.Tensor:
        """[T, HK, D] of the step."""
        return self._of_step(self.keys)

    @property
    def new_value(self) -> torch.Tensor:
        """[T, HK, D] of the step."""
        return self._of_step(self.values)

    def past(self) -> Iterator[tuple[AttentionBatch, torch.Tensor, torch.Tensor]]:
        """Steps that write all tokens before this one: (batch, key, value).

        Each block is a sequence of its own, so that the time is that of the tokens and not of their square.
        """
        table, length = self._table(), self.shape.context_len - self.shape.query_len
        starts = range(0, length, self.block_size)
        rows = [(n, start, min(self.block_size, length - start)) for n in range(len(table)) for start in starts]
        step = max(1, _PAST_CHUNK // self.block_size)
        for first in range(0, len(rows), step):
            chosen = rows[first : first + step]
            blocks = np.array([[table[n, start // self.block_size]] for n, start, _ in chosen], dtype=np.int32)
            lengths = [count for _, _, count in chosen]
            batch = make_batch(lengths, lengths, blocks, self.block_size, self.query.device)
            yield batch, self._rows(self.keys, chosen), self._rows(self.values, chosen)

    def error(self, out: torch.Tensor, layer: AttentionLayer) -> float:
        """The largest difference of sampled rows of `out` from float64, as a share of the largest value of these."""
        shape = self.shape
        rows = np.unique(np.linspace(0, shape.num_tokens - 1, _SAMPLED_ROWS).astype(int)).tolist()
        expected = torch.stack([self._expected(row, layer) for row in rows])
        found = out[rows].double().cpu()
        return float((found - expected).abs().max() / expected.abs().max())

    def _expected(self, row: int, layer: AttentionLayer) -> torch.Tensor:
        """Attention of one query row in float64, [H, D]."""
        n, offset = divmod(row, self.shape.query_len)
        end = self.shape.context_len - self.shape.query_len + offset + 1
        start = 0 if layer.sliding_window is None else max(0, end - layer.sliding_window)
        key, value = (tensor[n, start:end].double().cpu() for tensor in (self.keys, self.values))
        query = self.query[row].double().cpu().view(key.shape[1], -1, key.shape[2])  # [HK, group, D]
        weights = (torch.einsum("hgd,lhd->hgl", query, key) * layer.scale).softmax(-1)
        return torch.einsum("hgl,lhd->hgd", weights, value).flatten(0, 1)

    def _of_step(self, rows: torch.Tensor) -> torch.Tensor:
        return rows[:, self.shape.context_len - self.shape.query_len :].flatten(0, 1).contiguous()

    def _rows(self, tensor: torch.Tensor, chosen: list[tuple[int, int, int]]) -> torch.Tensor:
        return torch.cat([tensor[n, start : start + count] for n, start, count in chosen])

    def _table(self) -> IntArray:
        table = self.batch.host_block_table
        if table is None:
            raise RuntimeError("the batch was made without its host block table")
        return table


def make_inputs(shape: AttentionShape, spec: AttentionSpec, device: torch.device) -> AttentionInputs:
    """Normal random numbers, the same for every backend."""
    random = torch.Generator().manual_seed(0)
    dtype: torch.dtype = getattr(torch, spec.dtype)
    blocks_each = -(-shape.context_len // spec.block_size)
    num_blocks = shape.num_sequences * blocks_each + 1
    order = torch.randperm(num_blocks - 1, generator=random).numpy().astype(np.int32) + 1
    table = order.reshape(shape.num_sequences, blocks_each)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=random).to(device, dtype)

    sizes = (shape.num_sequences, shape.context_len, spec.num_kv_heads)
    query_lens, context_lens = ([length] * shape.num_sequences for length in (shape.query_len, shape.context_len))
    return AttentionInputs(
        shape=shape,
        block_size=spec.block_size,
        batch=make_batch(query_lens, context_lens, table, spec.block_size, device),
        query=normal(shape.num_tokens, spec.num_heads, spec.head_dim),
        keys=normal(*sizes, spec.head_dim),
        values=normal(*sizes, spec.v_head_dim),
        num_blocks=num_blocks,
    )


def make_batch(
    query_lens: list[int], context_lens: list[int], table: IntArray, block_size: int, device: torch.device
) -> AttentionBatch:
    """A step's metadata as a model runner makes it; `table` [N, max_blocks] int32."""
    positions = [np.arange(c - q, c) for q, c in zip(query_lens, context_lens, strict=True)]
    blocks = [table[n, at // block_size].astype(np.int64) for n, at in enumerate(positions)]
    slots = [block * block_size + at % block_size for block, at in zip(blocks, positions, strict=True)]
    starts = np.concatenate(([0], np.cumsum(query_lens)))

    def upload(values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values).to(device)

    return AttentionBatch(
        query_start_loc=upload(starts.astype(np.int32)),
        seq_lens=upload(np.array(context_lens, dtype=np.int32)),
        block_table=upload(np.ascontiguousarray(table)),
        slot_mapping=upload(np.concatenate(slots)),
        query_lens=query_lens,
        context_lens=context_lens,
        max_query_len=max(query_lens),
        max_seq_len=max(context_lens),
        host_block_table=table,
    )
