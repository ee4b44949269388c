"""The torch_native backend against attention in float64."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.interfaces import AttentionBackendContext, AttentionLayer, AttentionSpec
from tokenyard_backends.torch_native import plugin
from tokenyard_backends.torch_native.backend import TorchNativeBackend

_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 4e-3}


def spec_of(case: Any, dtype: torch.dtype = torch.float32) -> AttentionSpec:
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


def backend_of(case: Any, dtype: torch.dtype = torch.float32) -> TorchNativeBackend:
    spec = spec_of(case, dtype)
    assert TorchNativeBackend.supports(spec) == []
    return TorchNativeBackend(AttentionBackendContext(spec=spec, device=torch.device("cpu"), num_threads=1))


def run(
    case: Any, layer: AttentionLayer, dtype: torch.dtype = torch.float32, *, with_lse: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    backend = backend_of(case, dtype)
    out = torch.full((*case.query.shape[:2], case.value.shape[2]), torch.nan, dtype=dtype)
    lse = torch.full(case.query.shape[:2], torch.nan) if with_lse else None
    cache = tuple(tensor.clone() for tensor in case.kv_cache)
    backend.forward(layer, case.query, case.key, case.value, cache, backend.plan(case.batch), out, lse)
    return out, lse


def assert_close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype = torch.float32) -> None:
    limit = _TOLERANCE[dtype]
    assert torch.isfinite(actual).all()
    torch.testing.assert_close(actual.double(), expected, rtol=limit, atol=limit)


lengths_strategy = st.lists(
    st.one_of(
        st.integers(1, 90).map(lambda context: (1, context)),
        st.tuples(st.integers(1, 40), st.integers(0, 50)).map(lambda pair: (pair[0], sum(pair))),
    ),
    min_size=1,
    max_size=6,
)


@st.composite
def settings_strategy(draw: st.DrawFn) -> dict[str, object]:
    kv_heads = draw(st.sampled_from([1, 2, 3]))
    return {
        "lengths": draw(lengths_strategy),
        "num_kv_heads": kv_heads,
        "num_heads": kv_heads * draw(st.sampled_from([1, 3, 4, 8])),
        "head_dim": draw(st.sampled_from([64, 80, 96, 128, 256])),
        "block_size": draw(st.sampled_from([1, 16, 32])),
        "seed": draw(st.integers(0, 1000)),
    }


@given(
    values=settings_strategy(),
    window=st.one_of(st.none(), st.integers(1, 60)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
@settings(max_examples=60, deadline=None)
def test_any_mixed_batch_over_a_poisoned_cache_equals_float64(
    attention_reference: ModuleType, values: dict[str, object], window: int | None, dtype: torch.dtype
) -> None:
    case = attention_reference.make_case(**values, dtype=dtype)
    layer = AttentionLayer(index=0, scale=case.query.shape[2] ** -0.5, sliding_window=window)
    expected, _ = attention_reference.reference(case, layer)
    assert_close(run(case, layer, dtype)[0], expected, dtype)


@given(
    values=settings_strategy(),
    window=st.one_of(st.none(), st.integers(1, 60)),
    soft_cap=st.one_of(st.none(), st.sampled_from([0.5, 30.0])),
    with_sinks=st.booleans(),
    with_lse=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_soft_caps_sinks_and_lse_equal_float64(
    attention_reference: ModuleType,
    values: dict[str, object],
    window: int | None,
    soft_cap: float | None,
    with_sinks: bool,
    with_lse: bool,
) -> None:
    case = attention_reference.make_case(**values)
    sinks = torch.linspace(-2, 3, case.query.shape[1]) if with_sinks else None
    layer = AttentionLayer(index=0, scale=0.2, sliding_window=window, soft_cap=soft_cap, sinks=sinks)
    expected, expected_lse = attention_reference.reference(case, layer)
    out, lse = run(case, layer, with_lse=with_lse)
    assert_close(out, expected)
    if lse is not None:
        assert_close(lse, expected_lse)


@pytest.mark.parametrize("soft_cap", [None, 20.0])
def test_the_value_head_size_may_differ_from_the_keys(attention_reference: ModuleType, soft_cap: float | None) -> None:
    case = attention_reference.make_case(
        lengths=[(1, 20), (5, 9), (7, 7)], num_heads=4, num_kv_heads=2, head_dim=24, v_head_dim=16, block_size=4
    )
    layer = AttentionLayer(index=0, scale=0.3, soft_cap=soft_cap)
    assert_close(run(case, layer)[0], attention_reference.reference(case, layer)[0])


def test_long_prompts_are_cut_into_spans_without_a_seam(attention_reference: ModuleType) -> None:
    case = attention_reference.make_case(
        lengths=[(1100, 1130), (600, 600)], num_heads=2, num_kv_heads=1, head_dim=8, block_size=16
    )
    for window in (None, 100):
        for soft_cap in (None, 10.0):
            layer = AttentionLayer(index=0, scale=0.4, sliding_window=window, soft_cap=soft_cap)
            assert_close(run(case, layer)[0], attention_reference.reference(case, layer)[0])


def test_half_precision_equals_float64(attention_reference: ModuleType) -> None:
    case = attention_reference.make_case(
        lengths=[(1, 50), (9, 30)], num_heads=6, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float16
    )
    layer = AttentionLayer(index=0, scale=0.125)
    assert_close(run(case, layer, torch.float16)[0], attention_reference.reference(case, layer)[0], torch.float16)


def test_a_prefix_written_in_this_step_is_read_by_the_sequence_that_shares_it(attention_reference: ModuleType) -> None:
    """Two sequences share block 0, which the first one fills in the very step in which both run."""
    random = torch.Generator().manual_seed(1)
    key, value = torch.randn(9, 1, 8, generator=random), torch.randn(9, 1, 8, generator=random)
    query = torch.randn(9, 2, 8, generator=random)
    cache = (torch.full((4, 4, 1, 8), torch.nan), torch.full((4, 4, 1, 8), torch.nan))
    table = torch.tensor([[0, 2], [0, 3]], dtype=torch.int32)
    slots = torch.tensor([0, 1, 2, 3, 8, 9, 12, 13, 14])  # 6 tokens of the first, then 3 after the shared 4
    case = attention_reference.Case(
        batch=attention_reference.make_batch([6, 3], [6, 7], table, slots),
        query=query,
        key=key,
        value=value,
        kv_cache=cache,
        keys=[key[:6], torch.cat((key[:4], key[6:]))],
        values=[value[:6], torch.cat((value[:4], value[6:]))],
    )
    layer = AttentionLayer(index=0, scale=0.35)
    assert_close(run(case, layer)[0], attention_reference.reference(case, layer)[0])


def test_rows_beside_the_step_and_other_slots_of_the_cache_stay_as_they_were(attention_reference: ModuleType) -> None:
    case = attention_reference.make_case(
        lengths=[(2, 5), (1, 3)], num_heads=2, num_kv_heads=1, head_dim=4, block_size=4
    )
    backend = backend_of(case)
    keys = case.kv_cache[0].nan_to_num(nan=7.0)
    before = keys.clone()
    backend.forward(
        AttentionLayer(index=0),
        case.query,
        case.key,
        case.value,
        (keys, case.kv_cache[1].nan_to_num(nan=7.0)),
        backend.plan(case.batch),
        torch.empty(3, 2, 4),
    )
    flat, slots = keys.flatten(0, 1), case.batch.slot_mapping
    assert torch.equal(flat[slots], case.key)
    others = torch.ones(len(flat), dtype=torch.bool)
    others[slots] = False
    assert torch.equal(flat[others], before.flatten(0, 1)[others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_heads", [3, 6, 9, 21])
def test_a_sequence_alone_gives_the_same_bits_as_in_any_batch(
    attention_reference: ModuleType, num_heads: int, dtype: torch.dtype
) -> None:
    lengths = [(1, context) for context in (3, 17, 18, 33, 100, 101, 140, 150, 300, 20)] + [(6, 40), (12, 12)]
    case = attention_reference.make_case(
        lengths=lengths, num_heads=num_heads, num_kv_heads=3, head_dim=64, block_size=16, dtype=dtype
    )
    layer = AttentionLayer(index=0, scale=0.125)
    together, _ = run(case, layer, dtype)
    for index in range(len(lengths)):
        alone, rows = select(attention_reference, case, index)
        assert torch.equal(run(alone, layer, dtype)[0], together[rows]), lengths[index]


def select(attention_reference: ModuleType, case: Any, index: int) -> tuple[Any, slice]:
    """Sequence `index` of a case as a batch of its own, and its query rows."""
    starts = case.batch.query_start_loc
    rows = slice(int(starts[index]), int(starts[index + 1]))
    batch = attention_reference.make_batch(
        [case.batch.query_lens[index]],
        [case.batch.context_lens[index]],
        case.batch.block_table[index : index + 1],
        case.batch.slot_mapping[rows],
    )
    return replace(case, batch=batch, query=case.query[rows], key=case.key[rows], value=case.value[rows]), rows


def test_a_plan_serves_every_layer_of_its_step_with_different_windows(attention_reference: ModuleType) -> None:
    case = attention_reference.make_case(
        lengths=[(1, 30), (4, 21)], num_heads=2, num_kv_heads=2, head_dim=8, block_size=4
    )
    backend = backend_of(case)
    plan = backend.plan(case.batch)
    for window in (5, None, 9, 5):
        layer = AttentionLayer(index=0, scale=0.3, sliding_window=window)
        out = torch.empty(5, 2, 8)
        cache = tuple(tensor.clone() for tensor in case.kv_cache)
        backend.forward(layer, case.query, case.key, case.value, cache, plan, out)
        assert_close(out, attention_reference.reference(case, layer)[0])


def test_the_work_space_serves_calls_inside_and_outside_of_inference_mode(attention_reference: ModuleType) -> None:
    case = attention_reference.make_case(lengths=[(1, 9)], num_heads=2, num_kv_heads=1, head_dim=8, block_size=4)
    backend, layer = backend_of(case), AttentionLayer(index=0, scale=0.3)
    expected, _ = attention_reference.reference(case, layer)
    for mode in (True, False):
        out = torch.empty(1, 2, 8)
        with torch.inference_mode(mode):
            backend.forward(layer, case.query, case.key, case.value, case.kv_cache, backend.plan(case.batch), out)
        assert_close(out, expected)


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


def test_a_foreign_plan_is_our_bug_and_says_so(attention_reference: ModuleType) -> None:
    case = attention_reference.make_case(lengths=[(1, 2)], num_heads=1, num_kv_heads=1, head_dim=8, block_size=4)
    with pytest.raises(TypeError, match="plan must come from this backend"):
        backend_of(case).forward(
            AttentionLayer(index=0), case.query, case.key, case.value, case.kv_cache, object(), case.query
        )


def test_the_layout_has_keys_and_values_apart(attention_reference: ModuleType) -> None:
    case = attention_reference.make_case(
        lengths=[(1, 2)], num_heads=2, num_kv_heads=2, head_dim=8, v_head_dim=4, block_size=4
    )
    layout = backend_of(case).kv_cache_layout(spec_of(case), 7)
    assert (layout.key_shape, layout.value_shape) == ((7, 4, 2, 8), (7, 4, 2, 4))


def test_the_plugin_builds_a_backend_through_its_descriptor(attention_reference: ModuleType) -> None:
    case = attention_reference.make_case(lengths=[(1, 2)], num_heads=2, num_kv_heads=2, head_dim=8, block_size=4)
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
