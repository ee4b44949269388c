"""The backend: launches the kernels that a step's plan asks for.

The cache is NHD, K and V apart: [blocks, block size, KV heads, head size].

Legend: T = tokens of the step, H / HK = query / KV heads, R = decoding rows, P = tiles of prompts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
from tokenyard.errors import ConfigError
from tokenyard.interfaces import AttentionBackend, KVCacheLayout

from tokenyard_backends.triton import kernels
from tokenyard_backends.triton.interpreter import multiplies_bfloat16
from tokenyard_backends.triton.limits import is_interpreted, refusals
from tokenyard_backends.triton.plan import (
    MAX_SPLITS,
    Counting,
    GrowingBuffer,
    StepPlan,
    decoding_sequences,
    most_splits,
    packed_to_device,
    prompt_tiles,
)
from tokenyard_backends.triton.tiles import Tile, Tiles, padded, tiles_for

if TYPE_CHECKING:
    from tokenyard.interfaces import AttentionBackendContext, AttentionBatch, AttentionLayer, AttentionSpec

    from tokenyard_backends.triton.plugin import TritonOptions

_INTERPRETED_AS = (8, 0)  # the interpreter has no chip; it takes the tiles of this one
_WRITTEN_AT_ONCE = 2048  # elements of K or V that one program copies


class TritonBackend(AttentionBackend):
    """Log-sum-exp is supported and includes a layer's sinks; decoding steps may be recorded in a CUDA graph."""

    has_lse = True
    can_capture = True

    def __init__(self, options: TritonOptions, context: AttentionBackendContext, tiles: Tiles | None = None) -> None:
        """`tiles`: None = those of the table for the device."""
        _check(options, context.spec)
        spec, device = context.spec, context.device
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else _INTERPRETED_AS
        tiles = tiles or tiles_for(capability, spec.dtype, spec.head_dim, spec.v_head_dim)
        self._device = device
        self._launches = _Launches(spec, tiles, options.split_tokens)
        self._counting = Counting(device)
        self._split_out = GrowingBuffer(device, torch.float32)
        self._split_lse = GrowingBuffer(device, torch.float32)
        self._split_heads = (spec.num_heads, spec.v_head_dim)
        self.description = f"Triton {triton.__version__}" + (", interpreted" if is_interpreted() else "")

    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return refusals(spec)

    def kv_cache_layout(self, spec: AttentionSpec, num_blocks: int) -> KVCacheLayout:
        rows = (num_blocks, spec.block_size, spec.num_kv_heads)
        return KVCacheLayout(key_shape=(*rows, spec.head_dim), value_shape=(*rows, spec.v_head_dim))

    def plan(self, batch: AttentionBatch) -> StepPlan:
        if batch.max_query_len == 1:
            return self.plan_capture(batch)
        sequences = decoding_sequences(batch)
        tiles = prompt_tiles(batch, self._launches.prompt_tokens)
        longest = max((batch.context_lens[sequence] for sequence in sequences), default=0)
        return self._plan(batch, *packed_to_device(sequences, tiles, self._device), longest)

    def plan_capture(self, batch: AttentionBatch) -> StepPlan:
        """Nothing but decoding rows: all that the kernels read is in the batch's own tensors."""
        sequences = self._counting.take(batch.num_sequences)
        return self._plan(batch, sequences, sequences.new_empty((0, 2)), batch.max_seq_len)

    def _plan(self, batch: AttentionBatch, sequences: torch.Tensor, tiles: torch.Tensor, longest: int) -> StepPlan:
        splits = most_splits(longest, None, self._launches.split_tokens)
        num_heads, v_head_dim = self._split_heads
        parts = len(sequences) * num_heads * splits if splits > 1 else 0
        return StepPlan(
            batch=batch,
            sequences=sequences,
            longest=longest,
            tiles=tiles,
            split_out=self._split_out.take(parts * v_head_dim),
            split_lse=self._split_lse.take(parts),
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        plan: object,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        if not isinstance(plan, StepPlan):
            raise TypeError(f"plan must come from this backend's plan(), got {type(plan).__name__}")
        query, key, value = _packed(query), _packed(key), _packed(value)
        self._launches.write(key, value, kv_cache, plan)
        if len(plan.sequences):
            self._launches.decode(layer, query, kv_cache, plan, out, lse)
        if len(plan.tiles):
            self._launches.prompts(layer, query, kv_cache, plan, out, lse)


def _check(options: TritonOptions, spec: AttentionSpec) -> None:
    """Raises ConfigError."""
    if options.split_tokens < 1:
        raise ConfigError(
            f"attention.split_tokens={options.split_tokens} is below 1; it is how many K/V tokens one program reads"
        )
    if is_interpreted() and spec.dtype == "bfloat16" and not multiplies_bfloat16():
        raise ConfigError("Triton's interpreter multiplies bfloat16 wrongly; use model.dtype=float32 or float16")


class _Launches:
    """The kernels with all that a model's shape and the device's tiles make of them."""

    def __init__(self, spec: AttentionSpec, tiles: Tiles, split_tokens: int) -> None:
        group = spec.num_heads // spec.num_kv_heads
        heads = {"HK": spec.num_kv_heads, "D": spec.head_dim, "DV": spec.v_head_dim}
        sides = {"TILE_D": padded(spec.head_dim), "TILE_DV": padded(spec.v_head_dim)}
        splits = {"MIN_SPLIT": split_tokens, "MAX_SPLITS": MAX_SPLITS, "KEYS": tiles.decode.keys}
        paged = {**heads, **sides, "GROUP": group, "BLOCK_SIZE": spec.block_size}
        self._num_heads, self._num_kv_heads = spec.num_heads, spec.num_kv_heads
        self.split_tokens = split_tokens
        self._written_heads = max(1, min(padded(spec.num_kv_heads), _WRITTEN_AT_ONCE // max(sides.values())))
        self._write = {**heads, **sides, "TILE_HEADS": self._written_heads, "num_warps": 4}
        self._decode = {**paged, **splits, **_of_tile(tiles.decode, group)}
        self._merge = {**splits, "H": spec.num_heads, "DV": spec.v_head_dim, "TILE_DV": sides["TILE_DV"]}
        self._prompt = {**paged, **_of_tile(tiles.prompt, group)}
        self.prompt_tokens = self._prompt["ROWS"] // self._prompt["HEADS"]

    def write(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: tuple[torch.Tensor, torch.Tensor], plan: StepPlan
    ) -> None:
        """The step's K and V into the cache."""
        slots = plan.batch.slot_mapping
        grid = (len(slots), -(-self._num_kv_heads // self._written_heads))
        kernels.write_kv_kernel[grid](key, value, *kv_cache, slots, key.stride(0), value.stride(0), **self._write)

    def decode(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        plan: StepPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """The sequences with one query row, split by K/V; the parts are merged where there may be several."""
        batch, window, rows = plan.batch, layer.sliding_window, len(plan.sequences)
        room = most_splits(plan.longest, None, self.split_tokens)
        splits = most_splits(plan.longest, window, self.split_tokens)
        where = (plan.sequences, batch.query_start_loc, batch.seq_lens)
        kernels.decode_kernel[rows, self._programs(self._decode), splits](
            query,
            *kv_cache,
            out,
            lse,
            plan.split_out,
            plan.split_lse,
            layer.sinks,
            *where,
            batch.block_table,
            query.stride(0),
            batch.block_table.stride(0),
            room,
            window,
            layer.scale,
            layer.soft_cap,
            **self._decode,
        )
        if splits > 1:
            parts = (plan.split_out, plan.split_lse)
            kernels.merge_kernel[rows, self._num_heads](*parts, out, lse, *where, room, window, **self._merge)

    def prompts(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        plan: StepPlan,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """The sequences with several query rows."""
        batch = plan.batch
        kernels.prompt_kernel[len(plan.tiles), self._programs(self._prompt)](
            query,
            *kv_cache,
            out,
            lse,
            layer.sinks,
            plan.tiles,
            batch.query_start_loc,
            batch.seq_lens,
            batch.block_table,
            query.stride(0),
            batch.block_table.stride(0),
            layer.sliding_window,
            layer.scale,
            layer.soft_cap,
            **self._prompt,
        )

    def _programs(self, constants: dict[str, int]) -> int:
        """For all heads of one place of the grid's first axis."""
        return self._num_kv_heads * -(-constants["GROUP"] // constants["HEADS"])


def _packed(rows: torch.Tensor) -> torch.Tensor:
    """[T, heads, D] with the heads of a token one after the other, as the contract has it and not every caller."""
    return rows if rows.shape[1] == 1 or rows.stride(1) == rows.shape[2] else rows.contiguous()


def _of_tile(tile: Tile, group: int) -> dict[str, int]:
    return {
        "ROWS": tile.rows,
        "HEADS": min(group, tile.rows),
        "KEYS": tile.keys,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
    }
