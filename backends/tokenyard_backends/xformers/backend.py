"""The backend: K/V rows into the cache, then one operator for decoding sequences and one for prompts.

The cache is NHD, K and V apart: [blocks, block size, KV heads, head size]. The paged operator reads it as it is.
Neither operator knows sinks: they are added afterwards.

Legend: T = query rows, L = K/V rows, H / HK = query / KV heads, G = H / HK, D = head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from tokenyard.interfaces import AttentionBackend, KVCacheLayout

from tokenyard_backends.shared.refusals import common_refusals, head_dim_refusals, nvidia_refusals
from tokenyard_backends.shared.sinks import add_sinks
from tokenyard_backends.xformers.plan import StepPlan

if TYPE_CHECKING:
    from tokenyard.interfaces import AttentionBackendContext, AttentionBatch, AttentionLayer, AttentionSpec

    from tokenyard_backends.xformers.operators import Bias, Operator, Operators
    from tokenyard_backends.xformers.plan import DecodeWork, PromptWork

Cache: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
_DTYPES = ("bfloat16", "float16")
_HEAD_DIMS = (16, 32, 64, 128, 256)  # the paged operator has 512 too, where flash attention ends at 256
_KEY_TILE = 64  # keys that the paged operator reads at a time, all of one page


class _Result(NamedTuple):
    out: torch.Tensor  # [T, H, D]
    lse: torch.Tensor | None  # [T, H]


class XformersBackend(AttentionBackend):
    """xformers 0.0.35; log-sum-exp is supported and includes a layer's sinks.

    No CUDA graphs: a step's biases are made from its lengths on the host, and so are launches.
    """

    has_lse = True

    def __init__(self, context: AttentionBackendContext, operators: Operators) -> None:
        self._operators = operators
        self._block_size = context.spec.block_size
        self.description = f"decode {operators.paged.NAME}, prompts gathered for {operators.prompt.NAME}"

    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return list(_refusals(spec))

    def kv_cache_layout(self, spec: AttentionSpec, num_blocks: int) -> KVCacheLayout:
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return KVCacheLayout(key_shape=shape, value_shape=shape)

    def plan(self, batch: AttentionBatch) -> StepPlan:
        return StepPlan(self._operators.masks, batch, self._block_size)

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
        key_slots, value_slots = (cache.view(-1, *cache.shape[2:]) for cache in kv_cache)  # [L, HK, D]
        slots = (key_slots, value_slots)
        key_slots.index_copy_(0, plan.slots, key)
        value_slots.index_copy_(0, plan.slots, value)
        if lse is None and layer.sinks is not None:
            lse = query.new_empty(query.shape[:2], dtype=torch.float32)
        work = plan.work(layer.sliding_window)
        if work.decode is not None:
            self._decode(work.decode, layer, query, slots, _Result(out, lse))
        for prompt in work.prompts:
            self._prompt(prompt, layer, query, (key, value), slots, _Result(out, lse))
        if lse is not None and layer.sinks is not None:
            add_sinks(out, lse, layer.sinks)

    def _decode(
        self, work: DecodeWork, layer: AttentionLayer, query: torch.Tensor, slots: Cache, target: _Result
    ) -> None:
        rows = query if work.rows is None else query.index_select(0, work.rows)
        result = self._attend(self._operators.paged, layer, rows, slots, work.bias, target.lse is not None)
        whole_step = work.num_rows == len(query)
        _write(target, result, None if work.rows is None or whole_step else work.rows[: work.num_rows], work.num_rows)

    def _prompt(
        self,
        work: PromptWork,
        layer: AttentionLayer,
        query: torch.Tensor,
        new: Cache,  # this step's K and V rows
        slots: Cache,
        target: _Result,
    ) -> None:
        source, indices = (new, work.rows) if work.slots is None else (slots, work.slots)
        rows = query if work.rows is None else query.index_select(0, work.rows)
        keys = source if indices is None else (source[0].index_select(0, indices), source[1].index_select(0, indices))
        result = self._attend(self._operators.prompt, layer, rows, keys, work.bias, target.lse is not None)
        _write(target, result, work.rows, len(rows))

    def _attend(
        self,
        operator: Operator,
        layer: AttentionLayer,
        query: torch.Tensor,  # [T, H, D]
        keys: Cache,  # [L, HK, D]
        bias: Bias,
        wants_lse: bool,
    ) -> _Result:
        grouped = query.view(len(query), keys[0].shape[1], -1, query.shape[2])  # [T, HK, G, D]
        key, value = (rows.unsqueeze(2).expand(-1, -1, grouped.shape[2], -1).unsqueeze(0) for rows in keys)
        inputs = self._operators.inputs(
            query=grouped.unsqueeze(0), key=key, value=value, attn_bias=bias, scale=layer.scale
        )
        out, saved = operator.apply(inputs, needs_gradient=wants_lse)
        lse = None if saved is None else saved.lse[0].flatten(0, 1).transpose(0, 1)
        return _Result(out[0].flatten(1, 2), lse)


def _refusals(spec: AttentionSpec) -> Iterator[str]:
    yield from nvidia_refusals(spec)
    yield from common_refusals(spec, _DTYPES)
    yield from head_dim_refusals(spec, _HEAD_DIMS)
    if spec.block_size % _KEY_TILE:
        yield f"block size {spec.block_size} is not a multiple of {_KEY_TILE}; set kv_cache.block_size={_KEY_TILE}"
    if spec.soft_caps:
        yield "soft caps are not available: xformers' operators have none"


def _write(target: _Result, result: _Result, rows: torch.Tensor | None, num_rows: int) -> None:
    """The first `num_rows` of `result` to `rows` of `target`; None = to all of its rows."""
    for to, given in zip(target, result, strict=True):
        if to is None or given is None:
            continue
        if rows is None:
            to.copy_(given[:num_rows])
        else:
            to.index_copy_(0, rows, given[:num_rows].to(to.dtype))
