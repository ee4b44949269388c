"""The torch_native backend against attention in float64."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from tokenyard.interfaces import AttentionBackendContext, AttentionLayer, AttentionSpec
from tokenyard.testing import AttentionBackendContract
from tokenyard.testing.attention import AttentionCase, alone, expect_attention, make_case
from tokenyard_backends.torch_native import plugin
from tokenyard_backends.torch_native.backend import TorchNativeBackend
from tokenyard_backends.torch_native.varlen import varlen_step
from torch.utils._python_dispatch import TorchDispatchMode


class TestTorchNative(AttentionBackendContract):
    """On a CPU, with everything that the suite knows."""

    overrides = ("attention=torch_native",)
    same_bits = True


def spec_of(case: AttentionCase, dtype: torch.dtype = torch.float32) -> AttentionSpec:
    keys, values = case.kv_cache
    return AttentionSpec(
        device_type="cpu",
        dtype=str(dtype).removeprefix("torch."),
        num_heads=case.query.shape[1],
        num_kv_heads=keys.shape[2],
        head_dim=keys.shape[3],
        v_head_dim=values.shape[3],
        block_size=keys.shape[1],
    )


def backend_of(case: AttentionCase, dtype: torch.dtype = torch.float32) -> TorchNativeBackend:
    spec = spec_of(case, dtype)
    assert TorchNativeBackend.supports(spec) == []
    return TorchNativeBackend(AttentionBackendContext(spec=spec, device=torch.device("cpu"), num_threads=1))


def run(case: AttentionCase, layer: AttentionLayer, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    backend = backend_of(case, dtype)
    out = torch.full((*case.query.shape[:2], case.value.shape[2]), torch.nan, dtype=dtype)
    cache = (case.kv_cache[0].clone(), case.kv_cache[1].clone())
    backend.forward(layer, case.query, case.key, case.value, cache, backend.plan(case.batch), out)
    return out


def assert_right(out: torch.Tensor, case: AttentionCase, layer: AttentionLayer) -> None:
    expected = expect_attention(case, layer)
    assert ((out - expected.out).abs() <= expected.out_limit).all()


def test_long_prompts_are_cut_into_spans_without_a_seam() -> None:
    case = make_case(lengths=[(1100, 1130), (600, 600)], num_heads=2, num_kv_heads=1, head_dim=8, block_size=16)
    for window in (None, 100):
        for soft_cap in (None, 10.0):
            layer = AttentionLayer(index=0, scale=0.4, sliding_window=window, soft_cap=soft_cap)
            assert_right(run(case, layer), case, layer)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [3, 6, 9, 21])
def test_a_sequence_alone_gives_the_same_bits_as_in_any_batch(num_heads: int, dtype: torch.dtype) -> None:
    lengths = [(1, context) for context in (3, 17, 18, 33, 100, 101, 140, 150, 300, 20)] + [(6, 40), (12, 12)]
    case = make_case(lengths=lengths, num_heads=num_heads, num_kv_heads=3, head_dim=64, block_size=16, dtype=dtype)
    layer = AttentionLayer(index=0, scale=0.125)
    together = run(case, layer, dtype)
    for index, (low, high) in enumerate(pairwise(case.batch.query_start_loc.tolist())):
        assert torch.equal(run(alone(case, index), layer, dtype), together[low:high]), lengths[index]


class _Reads(TorchDispatchMode):
    """Notes every operator that asks a tensor for a value: on a GPU each waits for all that was asked before."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero, torch.ops.aten.equal):
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("soft_cap", [None, 20.0])
@pytest.mark.parametrize("window", [None, 9])
def test_a_step_asks_no_tensor_for_a_value(window: int | None, soft_cap: float | None) -> None:
    case = make_case(lengths=[(1, 30), (1, 7), (9, 21), (5, 5)], num_heads=4, num_kv_heads=2, head_dim=8, block_size=4)
    backend, layer = backend_of(case), AttentionLayer(index=0, sliding_window=window, soft_cap=soft_cap)
    with _Reads() as reads:
        out = torch.empty_like(case.query)
        backend.forward(layer, case.query, case.key, case.value, case.kv_cache, backend.plan(case.batch), out)
        varlen_step(case.batch, 4)
    assert reads.found == []
    with _Reads() as reads:
        int(out[0, 0, 0])
    assert reads.found != []


def test_a_batch_without_a_table_on_the_host_gives_the_same() -> None:
    """As runners for an API before 1.4 give it."""
    case = make_case(lengths=[(1, 30), (1, 7), (9, 21)], num_heads=4, num_kv_heads=2, head_dim=8, block_size=4)
    layer = AttentionLayer(index=0, scale=0.3)
    older = replace(case, batch=replace(case.batch, host_block_table=None))
    assert torch.equal(run(case, layer), run(older, layer))


def test_the_work_space_serves_calls_inside_and_outside_of_inference_mode() -> None:
    case = make_case(lengths=[(1, 9)], num_heads=2, num_kv_heads=1, head_dim=8, block_size=4)
    backend, layer = backend_of(case), AttentionLayer(index=0, scale=0.3)
    for mode in (True, False):
        out = torch.empty(1, 2, 8)
        with torch.inference_mode(mode):
            backend.forward(layer, case.query, case.key, case.value, case.kv_cache, backend.plan(case.batch), out)
        assert_right(out, case, layer)


def test_what_it_cannot_serve_is_refused_with_one_reason_each() -> None:
    good = AttentionSpec(
        device_type="cpu", dtype="float32", num_heads=4, num_kv_heads=2, head_dim=8, v_head_dim=8, block_size=16
    )
    assert TorchNativeBackend.supports(good) == []
    bad = replace(good, dtype="float8_e4m3fn", causal=False, kv_cache_dtype="fp8", num_kv_heads=3, block_size=0)
    reasons = TorchNativeBackend.supports(bad)
    assert len(reasons) == 5
    for word in ("float8_e4m3fn", "causal", "fp8", "3 KV heads", "block size 0"):
        assert any(word in reason for reason in reasons), word


def test_a_foreign_plan_is_our_bug_and_says_so() -> None:
    case = make_case(lengths=[(1, 2)], num_heads=1, num_kv_heads=1, head_dim=8, block_size=4)
    with pytest.raises(TypeError, match="plan must come from this backend"):
        backend_of(case).forward(
            AttentionLayer(index=0), case.query, case.key, case.value, case.kv_cache, object(), case.query
        )


def test_the_layout_has_keys_and_values_apart() -> None:
    case = make_case(lengths=[(1, 2)], num_heads=2, num_kv_heads=2, head_dim=8, v_head_dim=4, block_size=4)
    layout = backend_of(case).kv_cache_layout(spec_of(case), 7)
    assert (layout.key_shape, layout.value_shape) == ((7, 4, 2, 8), (7, 4, 2, 4))


def test_the_plugin_builds_a_backend_through_its_descriptor() -> None:
    case = make_case(lengths=[(1, 2)], num_heads=2, num_kv_heads=2, head_dim=8, block_size=4)
    (descriptor,) = plugin.tokenyard_attention_backends()
    spec = spec_of(case)
    context = AttentionBackendContext(spec=spec, device=torch.device("cpu"), num_threads=1)
    assert descriptor.name == "torch_native"
    assert descriptor.supports(spec) == []
    assert isinstance(descriptor.factory(descriptor.options_type(), context), TorchNativeBackend)


def test_importing_the_plugin_imports_no_torch() -> None:
    code = (
        "import sys; from tokenyard_backends.torch_native import plugin; "
        "list(plugin.tokenyard_attention_backends()); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
