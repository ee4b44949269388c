"""The flashinfer backend over the stand-in for its package, and steps for it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from tokenyard.arrays import IntArray
from tokenyard.interfaces import AttentionBackendContext, AttentionLayer, AttentionSpec
from tokenyard.testing.attention import AttentionCase, expect_attention, make_case
from tokenyard_backends.flashinfer.backend import FlashInferBackend, make_backend
from tokenyard_backends.flashinfer.plugin import FlashInferOptions

DECODE, PREFILL = "BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper"
DTYPE = torch.bfloat16
GOOD = AttentionSpec(
    device_type="cuda",
    dtype="bfloat16",
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    v_head_dim=64,
    block_size=16,
)
MIXED = [(1, 30), (5, 9), (7, 7), (1, 1), (20, 60)]
DECODING = [(1, 30), (1, 1), (1, 64), (1, 17)]


def spec_of(case: AttentionCase) -> AttentionSpec:
    keys, _ = case.kv_cache
    return replace(
        GOOD,
        dtype=str(keys.dtype).removeprefix("torch."),
        num_heads=case.query.shape[1],
        num_kv_heads=keys.shape[2],
        head_dim=keys.shape[3],
        v_head_dim=keys.shape[3],
        block_size=keys.shape[1],
    )


def backend_for(spec: AttentionSpec, **options: Any) -> FlashInferBackend:
    assert FlashInferBackend.supports(spec) == []
    context = AttentionBackendContext(spec=spec, device=torch.device("cpu"), num_threads=1)
    return make_backend(FlashInferOptions(**{"workspace_mib": 1} | options), context)


def a_case(lengths: list[tuple[int, int]], **changes: Any) -> AttentionCase:
    settings: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 64, "block_size": 16, "dtype": DTYPE}
    return make_case(lengths=lengths, **(settings | changes))


def table_of(case: AttentionCase) -> IntArray:
    table = case.batch.host_block_table
    assert table is not None
    return table


def assert_right(
    backend: FlashInferBackend, case: AttentionCase, layer: AttentionLayer, plan: object | None = None
) -> None:
    """Output and log-sum-exp within the limits of rounding."""
    out = torch.full_like(case.query, torch.nan).contiguous()
    lse = torch.full(case.query.shape[:2], torch.nan)
    cache = (case.kv_cache[0].clone(), case.kv_cache[1].clone())
    plan = backend.plan(case.batch) if plan is None else plan
    backend.forward(layer, case.query, case.key, case.value, cache, plan, out, lse)
    expected = expect_attention(case, layer)
    assert ((out.double() - expected.out).abs() <= expected.out_limit).all()
    assert ((lse.double() - expected.lse).abs() <= expected.lse_limit).all()
