"""Paged attention from torch's own operators.

The cache is NHD, K and V apart: [blocks, block size, KV heads, head size]. Blocks are gathered into a work space and
attended by `scaled_dot_product_attention`; for decoding, the query heads that share a KV head become query rows of one
head (on a CPU several times as fast as `enable_gqa` there). Soft caps, sinks and log-sum-exp take an explicit path in
float32. Cache rows that no token was written to are zeroed in the work space: a mask alone would let NaN through.

On a GPU nothing is gathered where torch's `varlen_attn` reads the pages itself: `find_varlen` says when.

Legend: T = tokens of the step, B = sequences, H / HK = query / KV heads, G = H / HK, Q = query rows, L = K/V rows,
D / DV = head size of keys / values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import torch
import torch.nn.functional as F  # noqa: N812
from tokenyard.interfaces import AttentionBackend, KVCacheLayout

from tokenyard_backends.shared.refusals import common_refusals
from tokenyard_backends.torch_native.explicit import attend_explicitly
from tokenyard_backends.torch_native.plan import DecodeGroup, PromptWork, QuerySpan, StepPlan
from tokenyard_backends.torch_native.varlen import find_varlen

if TYPE_CHECKING:
    from tokenyard.interfaces import AttentionBackendContext, AttentionBatch, AttentionLayer, AttentionSpec

Cache: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# On a CPU the bits of a float32 head depend on how its thread's buffer is aligned, unless it has a multiple of 4 query
# rows. With them a decoding row does not depend on its batch mates; 3 rows become faster, 1 row up to twice as slow.
_EVEN_ROWS = 4


class TorchNativeBackend(AttentionBackend):
    """Runs on any device that torch has; log-sum-exp is supported and includes a layer's sinks."""

    has_lse = True

    def __init__(self, context: AttentionBackendContext) -> None:
        spec = context.spec
        self._block_size = spec.block_size
        self._dtype = _DTYPES[spec.dtype]
        self._num_kv_heads = spec.num_kv_heads
        self._group_size = spec.num_heads // spec.num_kv_heads
        exact = context.device.type == "cpu" and self._dtype == torch.float32
        self._row_padding = -self._group_size % _EVEN_ROWS if exact else 0
        self._work_space = _WorkSpace(context.device, self._dtype)
        self._varlen, self.description = find_varlen(context)

    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return list(common_refusals(spec, _DTYPES))

    def kv_cache_layout(self, spec: AttentionSpec, num_blocks: int) -> KVCacheLayout:
        rows = (num_blocks, spec.block_size, spec.num_kv_heads)
        return KVCacheLayout(key_shape=(*rows, spec.head_dim), value_shape=(*rows, spec.v_head_dim))

    def plan(self, batch: AttentionBatch) -> StepPlan:
        return StepPlan(batch, self._block_size, self._dtype)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Cache,
        plan: object,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        if not isinstance(plan, StepPlan):
            raise TypeError(f"plan must come from this backend's plan(), got {type(plan).__name__}")
        for cache, new in zip(kv_cache, (key, value), strict=True):
            cache.view(-1, *cache.shape[2:]).index_copy_(0, plan.slots, new)
        explicit = lse is not None or layer.soft_cap is not None or layer.sinks is not None
        window = layer.sliding_window
        if self._varlen is not None and not explicit and self._varlen.serves(window):
            out.copy_(self._varlen.attend(query, kv_cache, plan.varlen, scale=layer.scale, window=window))
            return
        work = plan.work(window, explicit=explicit)
        step = _LayerStep(self, layer, query, (key, value), kv_cache, out, lse, explicit)
        for group in work.groups:
            step.decode(group)
        for prompt in work.prompts:
            step.prompt(prompt)

    def gather(
        self, kv_cache: Cache, blocks: torch.Tensor, unwritten: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V rows of `blocks` in order, [rows, HK, D]; they live in the work space until the next call."""
        key, value = (self._work_space.gather(index, cache, blocks, unwritten) for index, cache in enumerate(kv_cache))
        return key, value

    def attend_folded(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Attention of `query` [B, HK, G, D] over [B, HK, L, D]: [B, HK, G, DV]."""
        if self._row_padding:
            query = F.pad(query, (0, 0, 0, self._row_padding))
        result = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=layer.scale)
        return result[:, :, : self._group_size]

    def fold(self, heads: torch.Tensor) -> torch.Tensor:
        """[B, H, D] of one query row each -> [B, HK, G, D]."""
        return heads.view(heads.shape[0], self._num_kv_heads, self._group_size, heads.shape[2])


@dataclass(frozen=True, slots=True)
class _LayerStep:
    """One layer's forward: its tensors, and the two kinds of work."""

    backend: TorchNativeBackend
    layer: AttentionLayer
    query: torch.Tensor
    new: Cache  # this step's K and V rows
    kv_cache: Cache
    out: torch.Tensor
    lse: torch.Tensor | None
    explicit: bool

    def decode(self, group: DecodeGroup) -> None:
        """One query row of each of the group's sequences."""
        gathered = self.backend.gather(self.kv_cache, group.blocks, group.unwritten)
        key, value = (rows.view(group.num_sequences, -1, *rows.shape[1:]).transpose(1, 2) for rows in gathered)
        rows = self.query if group.rows is None else self.query.index_select(0, group.rows)
        folded = self.backend.fold(rows)  # [B, HK, G, D]
        if self.explicit:
            result, lse = attend_explicitly(self.layer, folded.unsqueeze(3), key, value, group.mask)
            self._write_lse(group.rows, lse)
        else:
            result = self.backend.attend_folded(self.layer, folded, key, value, group.mask)
        result = result.reshape(rows.shape[0], rows.shape[1], -1)
        if group.rows is None:
            self.out.copy_(result)
        else:
            self.out.index_copy_(0, group.rows, result)

    def prompt(self, prompt: PromptWork) -> None:
        """All query rows of one sequence."""
        if prompt.blocks is None:
            key, value = (new[prompt.own_rows] for new in self.new)
        else:
            key, value = self.backend.gather(self.kv_cache, prompt.blocks, None)
        for span in prompt.spans:
            self._attend_span(span, key[span.keys], value[span.keys])

    def _attend_span(self, span: QuerySpan, key: torch.Tensor, value: torch.Tensor) -> None:
        key, value = key.transpose(0, 1).unsqueeze(0), value.transpose(0, 1).unsqueeze(0)  # [1, HK, L, D]
        rows = self.query[span.rows]  # [Q, H, D]
        if self.explicit:
            grouped = self.backend.fold(rows).permute(1, 2, 0, 3).unsqueeze(0)  # [1, HK, G, Q, D]
            result, lse = attend_explicitly(self.layer, grouped, key, value, span.mask)
            self.out[span.rows] = result[0].flatten(0, 1).transpose(0, 1)
            if self.lse is not None:
                self.lse[span.rows] = lse[0].flatten(0, 1).transpose(0, 1)
            return
        result = F.scaled_dot_product_attention(
            rows.transpose(0, 1).unsqueeze(0),
            key,
            value,
            attn_mask=span.mask,
            is_causal=span.causal,
            scale=self.layer.scale,
            enable_gqa=key.shape[1] != rows.shape[1],
        )
        self.out[span.rows] = result[0].transpose(0, 1)

    def _write_lse(self, rows: torch.Tensor | None, lse: torch.Tensor) -> None:
        """`lse` [B, HK, G, 1] of decoding rows."""
        if self.lse is None:
            return
        flat = lse.flatten(1)
        if rows is None:
            self.lse.copy_(flat)
        else:
            self.lse.index_copy_(0, rows, flat)


class _WorkSpace:
    """Two buffers, for K and V, that grow to the largest gather: fresh memory each time costs more than the copy."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._buffers = [torch.empty(0, device=device, dtype=dtype) for _ in range(2)]

    def gather(
        self, index: int, cache: torch.Tensor, blocks: torch.Tensor, unwritten: torch.Tensor | None
    ) -> torch.Tensor:
        pages = cache.view(cache.shape[0], -1)  # [blocks, block size * HK * D]
        shape = (blocks.shape[0], pages.shape[1])
        target = self._buffer(index, shape[0] * shape[1]).view(shape)
        torch.index_select(pages, 0, blocks, out=target)
        rows = target.view(-1, *cache.shape[2:])
        if unwritten is not None:
            rows.index_fill_(0, unwritten, 0)
        return rows

    def _buffer(self, index: int, size: int) -> torch.Tensor:
        if self._buffers[index].numel() < size:
            with torch.inference_mode(False):  # usable inside and outside of inference mode
                self._buffers[index] = self._buffers[index].new_empty(size)
        return self._buffers[index][:size]
