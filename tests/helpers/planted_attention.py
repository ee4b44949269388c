"""Attention backends of other authors: one that is right, and some with a fault each that the suite must find.

The right one is as plain as can be: float32, one sequence after the other, every step of it a method to get wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tokenyard import AttentionBackendDescriptor
from tokenyard.config import NoOptions
from tokenyard.interfaces import (
    AttentionBackend,
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    AttentionSpec,
    KVCacheLayout,
)

Cache = tuple[torch.Tensor, torch.Tensor]
Attended = tuple[torch.Tensor, torch.Tensor]  # [Q, H, DV] and [Q, H]


@dataclass
class Plan:
    slots: torch.Tensor
    tables: list[list[int]]
    query_lens: Sequence[int]
    lengths: Sequence[int]


@dataclass
class Call:
    """The arguments of `forward`."""

    layer: AttentionLayer
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    kv_cache: Cache
    plan: Plan
    out: torch.Tensor
    lse: torch.Tensor | None


def refusals(spec: AttentionSpec) -> list[str]:
    reasons = []
    if spec.dtype not in ("float32", "bfloat16", "float16"):
        reasons.append(f"dtype {spec.dtype} is unknown")
    if spec.kv_cache_dtype not in ("auto", spec.dtype):
        reasons.append(f"a K/V cache of {spec.kv_cache_dtype} is unknown")
    if spec.block_size < 1:
        reasons.append(f"block size {spec.block_size} is below 1")
    if spec.num_heads % spec.num_kv_heads:
        reasons.append("each KV head needs the same number of heads")
    if not spec.causal:
        reasons.append("attention without a mask is unknown")
    return reasons


class Right(AttentionBackend):
    """Right."""

    has_lse = True
    can_capture = True

    def __init__(self, context: AttentionBackendContext) -> None:
        self.spec = context.spec

    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return refusals(spec)

    def kv_cache_layout(self, spec: AttentionSpec, num_blocks: int) -> KVCacheLayout:
        rows = (num_blocks, spec.block_size, spec.num_kv_heads)
        return KVCacheLayout(key_shape=(*rows, spec.head_dim), value_shape=(*rows, spec.v_head_dim))

    def plan(self, batch: AttentionBatch) -> Plan:
        tables = [
            row[: -(-length // self.spec.block_size)]
            for row, length in zip(batch.block_table.tolist(), batch.context_lens, strict=True)
        ]
        return Plan(batch.slot_mapping, tables, batch.query_lens, batch.context_lens)

    def update_capture(self, plan: object, batch: AttentionBatch) -> None:
        assert isinstance(plan, Plan)
        self.renew(plan, batch)

    def renew(self, plan: Plan, batch: AttentionBatch) -> None:
        """A recording's plan, for a replay."""
        new = self.plan(batch)
        plan.tables, plan.lengths = new.tables, new.lengths

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
        assert isinstance(plan, Plan)
        self.step(Call(layer, query, key, value, kv_cache, plan, out, lse))

    def step(self, call: Call) -> None:
        for cache, rows in zip(call.kv_cache, (call.key, call.value), strict=True):
            self.write(cache, call.plan.slots, rows)
        start = 0
        for table, count, length in zip(call.plan.tables, call.plan.query_lens, call.plan.lengths, strict=True):
            span = slice(start, start + count)
            keys, values = (self.read(cache, table, length).float() for cache in call.kv_cache)
            result, log = self.attend(call.layer, call.query[span].float(), keys, values)
            call.out[span] = result.to(call.out.dtype)
            if call.lse is not None:
                call.lse[span] = log
            start += count

    def write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        cache.flatten(0, 1)[slots] = rows

    def read(self, cache: torch.Tensor, table: list[int], length: int) -> torch.Tensor:
        """[L, HK, D] rows of a sequence."""
        return cache[table].flatten(0, 1)[:length]

    def attend(self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attended:
        heads = self.kv_heads(query.shape[1], key.shape[1])
        scores = torch.einsum("qhd,lhd->qhl", query, key[:, heads]) * self.scale(layer)
        scores = self.cap(layer, scores).masked_fill(self.hidden(layer, len(query), len(key)), -torch.inf)
        log = self.with_sinks(layer, scores).logsumexp(2)
        weights = (scores - log[..., None]).exp()
        return torch.einsum("qhl,lhd->qhd", weights, self.visible(layer, value[:, heads], len(query))), log

    def kv_heads(self, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        return torch.arange(num_heads) // (num_heads // num_kv_heads)

    def scale(self, layer: AttentionLayer) -> float:
        return layer.scale

    def cap(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        return scores if layer.soft_cap is None else layer.soft_cap * (scores / layer.soft_cap).tanh()

    def hidden(self, layer: AttentionLayer, num_queries: int, length: int) -> torch.Tensor:
        queries, keys = torch.arange(length - num_queries, length)[:, None], torch.arange(length)
        hidden = keys > queries
        if layer.sliding_window is not None:
            hidden |= keys <= queries - layer.sliding_window
        return hidden[:, None]

    def with_sinks(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        if layer.sinks is None:
            return scores
        return torch.cat((scores, layer.sinks.float().view(1, -1, 1).expand(len(scores), -1, 1)), 2)

    def visible(self, layer: AttentionLayer, value: torch.Tensor, num_queries: int) -> torch.Tensor:
        """Zeros where no query looks: their weights are 0, but 0 times NaN is not."""
        window = layer.sliding_window
        if window is not None:
            first = max(0, len(value) - num_queries - window + 1)
            value = torch.cat((torch.zeros_like(value[:first]), value[first:]))
        return value


def backend(make: type[Right], name: str = "planted", **changes: object) -> AttentionBackendDescriptor[NoOptions]:
    return AttentionBackendDescriptor(
        name=name,
        api_version=(1, 7),
        factory=lambda options, context: make(context),
        supports=make.supports,
        **changes,  # type: ignore[arg-type]
    )


class OwnScale(Right):
    """1 / sqrt(head size), whatever the layer says."""

    def scale(self, layer: AttentionLayer) -> float:
        return 1 / math.sqrt(self.spec.head_dim)


class WideWindow(Right):
    """Sees one token more."""

    def hidden(self, layer: AttentionLayer, num_queries: int, length: int) -> torch.Tensor:
        window = layer.sliding_window
        wider = layer if window is None else replace(layer, sliding_window=window + 1)
        return super().hidden(wider, num_queries, length)

    def visible(self, layer: AttentionLayer, value: torch.Tensor, num_queries: int) -> torch.Tensor:
        return value


class NarrowWindow(Right):
    """Sees one token less, but always itself."""

    def hidden(self, layer: AttentionLayer, num_queries: int, length: int) -> torch.Tensor:
        window = layer.sliding_window
        narrower = layer if window is None else replace(layer, sliding_window=max(1, window - 1))
        return super().hidden(narrower, num_queries, length)


class NoWindow(Right):
    def hidden(self, layer: AttentionLayer, num_queries: int, length: int) -> torch.Tensor:
        return super().hidden(replace(layer, sliding_window=None), num_queries, length)

    def visible(self, layer: AttentionLayer, value: torch.Tensor, num_queries: int) -> torch.Tensor:
        return value


class NoCap(Right):
    def cap(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        return scores


class HardCap(Right):
    """Cuts instead of bending."""

    def cap(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        return scores if layer.soft_cap is None else scores.clamp(-layer.soft_cap, layer.soft_cap)


class NoSinks(Right):
    def with_sinks(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        return scores


class OneSink(Right):
    """The first head's, for all."""

    def with_sinks(self, layer: AttentionLayer, scores: torch.Tensor) -> torch.Tensor:
        sinks = layer.sinks
        return super().with_sinks(layer if sinks is None else replace(layer, sinks=sinks[:1].expand_as(sinks)), scores)


class HeadsInTurn(Right):
    """Head h reads KV head h % HK."""

    def kv_heads(self, num_heads: int, num_kv_heads: int) -> torch.Tensor:
        return torch.arange(num_heads) % num_kv_heads


class MaskFromTheFront(Right):
    """Query row i sees i + 1 tokens, although a past lies before it."""

    def hidden(self, layer: AttentionLayer, num_queries: int, length: int) -> torch.Tensor:
        return (torch.arange(length) > torch.arange(num_queries)[:, None])[:, None]


class LastBlockForgotten(Right):
    """Unless it is full."""

    def read(self, cache: torch.Tensor, table: list[int], length: int) -> torch.Tensor:
        rows, block_size = super().read(cache, table, length), self.spec.block_size
        full = length // block_size * block_size
        return torch.cat((rows[:full], torch.zeros_like(rows[full:]))) if full else rows


class TF32(Right):
    """Multiplies with 10 bits of mantissa, as a GPU does when it is not told otherwise."""

    def attend(self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attended:
        short, shorter = ((rows.view(torch.int32) & ~0x1FFF).view(torch.float32) for rows in (query, key))
        return super().attend(layer, short, shorter, value)


class BinaryLogs(Right):
    """Log-sum-exp to the base 2."""

    def attend(self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attended:
        result, log = super().attend(layer, query, key, value)
        return result, log * 1.4426950408889634


class LogsWithoutSinks(Right):
    def attend(self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attended:
        result, _ = super().attend(layer, query, key, value)
        return result, super().attend(replace(layer, sinks=None), query, key, value)[1]


class OneValueSize(Right):
    """Wrong where the values' head size is not the keys'."""

    def visible(self, layer: AttentionLayer, value: torch.Tensor, num_queries: int) -> torch.Tensor:
        value = super().visible(layer, value, num_queries)
        return value if self.spec.head_dim == self.spec.v_head_dim else value.roll(1, 2)


class NeverCausalAsAsked(Right):
    """Accepts `causal=False` and masks all the same."""

    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return refusals(replace(spec, causal=True))


class SplitsByTheBatch(Right):
    """Cuts every sequence at half of the batch's longest one: the bits depend on the mates."""

    def plan(self, batch: AttentionBatch) -> Plan:
        self.cut = max(1, batch.max_seq_len // 2)
        return super().plan(batch)

    def attend(self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attended:
        if len(query) > 1 or len(key) <= self.cut or layer.sliding_window or layer.sinks is not None:
            return super().attend(layer, query, key, value)
        (near, near_log), (far, far_log) = (
            super(SplitsByTheBatch, self).attend(layer, query, key[part], value[part])
            for part in (slice(self.cut, None), slice(self.cut))
        )
        log = torch.logaddexp(near_log, far_log)
        return near * (near_log - log).exp()[..., None] + far * (far_log - log).exp()[..., None], log
