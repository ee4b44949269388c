"""Decodes through xformers' real paged operator, in triton's interpreter, and prints the greatest errors as JSON.

Run by test_real_kernel.py in a process of its own: the interpreter is chosen when triton is imported.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace

import fake_xformers as fake
import torch
import triton
import triton_bf16
from tokenyard.interfaces import AttentionBackendContext, AttentionLayer, AttentionSpec
from tokenyard.testing.attention import expect_attention, make_case
from tokenyard_backends.xformers.backend import XformersBackend
from tokenyard_backends.xformers.operators import Operators

CASES = [
    # heads, KV heads, head size, block size, data type, window, with sinks
    (4, 4, 64, 64, "float16", None, False),
    (8, 2, 64, 64, "float16", None, True),
    (8, 1, 128, 64, "float16", 100, False),
    (9, 3, 64, 128, "bfloat16", None, False),
    (8, 2, 64, 64, "bfloat16", 70, True),
    (6, 2, 16, 64, "bfloat16", None, False),
    (2, 1, 256, 64, "bfloat16", None, False),
    (2, 1, 32, 192, "float16", 1, False),
]
LENGTHS = [(1, 1), (1, 17), (1, 64), (1, 65), (1, 300)]


def backend_for(package: object, spec: AttentionSpec) -> XformersBackend:
    operators = Operators(
        masks=package.attn_bias,  # type: ignore[attr-defined]
        inputs=package.Inputs,  # type: ignore[attr-defined]
        paged=package.triton_splitk.FwOp,  # type: ignore[attr-defined]
        prompt=SimpleNamespace(NAME="none"),
    )
    return XformersBackend(AttentionBackendContext(spec=spec, device=torch.device("cpu"), num_threads=1), operators)


def errors(
    num_heads: int, num_kv_heads: int, head_dim: int, block_size: int, dtype: str, window: int | None, with_sinks: bool
) -> dict[str, float]:
    """Greatest errors, and the greatest share of what `expect_attention` allows."""
    spec = AttentionSpec(
        device_type="cuda",
        dtype=dtype,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=head_dim,
        block_size=block_size,
    )
    case = make_case(
        lengths=LENGTHS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype={"float16": torch.float16, "bfloat16": torch.bfloat16}[dtype],
    )
    sinks = torch.linspace(-2, 3, num_heads) if with_sinks else None
    layer = AttentionLayer(index=0, scale=head_dim**-0.5, sliding_window=window, sinks=sinks)
    backend, expected = backend_for(fake.real_package(), spec), expect_attention(case, layer)
    assert XformersBackend.supports(spec) == []
    out, lse = torch.full_like(case.query, torch.nan), torch.full(case.query.shape[:2], torch.nan)
    plan = backend.plan(case.batch)
    backend.forward(layer, case.query, case.key, case.value, case.kv_cache, plan, out, lse)
    out_error, lse_error = (out - expected.out).abs(), (lse - expected.lse).abs()
    return {
        "out": float(out_error.max()),
        "lse": float(lse_error.max()),
        "share": max(float((out_error / expected.out_limit).max()), float((lse_error / expected.lse_limit).max())),
    }


if __name__ == "__main__":
    triton_bf16.install()
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # asked for at head size 128, to choose a tile
    found = [errors(*case) for case in CASES]
    json.dump({"triton": triton.__version__, "cases": found}, sys.stdout)
