"""The cpu_native backend: its numbers, its bits, its threads."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tokenyard.interfaces import AttentionBackendContext, AttentionLayer, AttentionSpec
from tokenyard.testing import AttentionBackendContract
from tokenyard.testing.attention import AttentionCase, expect_attention, make_batch, make_case
from tokenyard_backends.cpu_native import build, cache, plugin
from tokenyard_backends.cpu_native.backend import CpuNativeBackend, make_backend
from tokenyard_backends.cpu_native.cache import cpu_identity, load_kernels

_LAYER = AttentionLayer(index=0, scale=0.125)


class TestCpuNative(AttentionBackendContract):
    """Everything that the suite knows, and head sizes that fill no vector."""

    overrides = ("attention=cpu_native",)
    head_dims = (64, 80, 96, 128, 256, 40, 7)
    v_head_dims = ((96, 64), (24, 40), (64, 5))
    group_sizes = (1, 3, 4, 8, 5, 2)
    same_bits = True


def spec_of(case: AttentionCase) -> AttentionSpec:
    keys, values = case.kv_cache
    return AttentionSpec(
        device_type="cpu",
        dtype=str(case.query.dtype).removeprefix("torch."),
        num_heads=case.query.shape[1],
        num_kv_heads=keys.shape[2],
        head_dim=keys.shape[3],
        v_head_dim=values.shape[3],
        block_size=keys.shape[1],
    )


def backend_of(case: AttentionCase, num_threads: int = 1) -> CpuNativeBackend:
    backend = make_backend(
        AttentionBackendContext(spec=spec_of(case), device=torch.device("cpu"), num_threads=num_threads)
    )
    assert isinstance(backend, CpuNativeBackend), backend.description
    return backend


def hnd(case: AttentionCase) -> tuple[torch.Tensor, torch.Tensor]:
    """The case's caches in this backend's layout."""
    keys, values = (cache.transpose(1, 2).contiguous() for cache in case.kv_cache)
    return keys, values


def run(case: AttentionCase, layer: AttentionLayer = _LAYER, num_threads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and log-sum-exp."""
    backend = backend_of(case, num_threads)
    out = torch.full((*case.query.shape[:2], case.value.shape[2]), torch.nan, dtype=case.query.dtype)
    lse = torch.full(case.query.shape[:2], torch.nan)
    backend.forward(layer, case.query, case.key, case.value, hnd(case), backend.plan(case.batch), out, lse)
    return out, lse


def expect_close(case: AttentionCase, layer: AttentionLayer = _LAYER, num_threads: int = 1) -> None:
    out, lse = run(case, layer, num_threads)
    expected = expect_attention(case, layer)
    assert ((out.double() - expected.out).abs() <= expected.out_limit).all()
    assert ((lse.double() - expected.lse).abs() <= expected.lse_limit).all()


def long_case(dtype: torch.dtype = torch.float32, num_heads: int = 6) -> AttentionCase:
    """Decoding over several splits, around their edges, and prompts of several tiles."""
    lengths = [(1, 255), (1, 256), (1, 257), (1, 1300), (130, 700), (64, 64), (1, 1), (2, 513)]
    return make_case(lengths=lengths, num_heads=num_heads, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)


# ---- The numbers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lengths", [(1, 1), (3, 3)])
def test_scores_far_below_any_usual_one_are_still_scores(lengths: tuple[int, int]) -> None:
    case = make_case(lengths=[lengths], num_heads=1, num_kv_heads=1, head_dim=1, block_size=4)
    case.query.fill_(1e16)
    case.key.fill_(-1e15)
    out, _ = run(case, replace(_LAYER, scale=1.0))
    expected = case.value[:, 0].cumsum(0) / torch.arange(1, lengths[0] + 1)[:, None]
    torch.testing.assert_close(out[:, 0], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 1, 300, 511])
def test_contexts_of_several_splits_and_tiles_equal_float64(dtype: torch.dtype, window: int | None) -> None:
    sinks = torch.linspace(-2, 3, 6)
    expect_close(long_case(dtype), replace(_LAYER, sliding_window=window, soft_cap=20.0, sinks=sinks))
    expect_close(long_case(dtype), replace(_LAYER, sliding_window=window))


@pytest.mark.parametrize("num_heads", [71, 128])
def test_one_kv_head_may_serve_more_heads_than_a_tile_has_rows(num_heads: int) -> None:
    lengths = [(1, 300), (3, 70), (1, 9)]
    expect_close(make_case(lengths=lengths, num_heads=num_heads, num_kv_heads=1, head_dim=64, block_size=16))


def test_sizes_of_latent_attention_equal_float64() -> None:
    case = make_case(
        lengths=[(1, 300), (9, 40)], num_heads=16, num_kv_heads=1, head_dim=576, v_head_dim=512, block_size=16
    )
    expect_close(case, replace(_LAYER, scale=576**-0.5))


def test_scores_far_apart_and_far_below_zero_equal_float64() -> None:
    """Neither a lone huge score nor rows whose scores are all very low may overflow or vanish."""
    case = make_case(lengths=[(1, 700), (70, 200)], num_heads=2, num_kv_heads=1, head_dim=16, block_size=16)
    case.query.mul_(40.0)
    for scale in (5.0, -5.0):
        expect_close(case, replace(_LAYER, scale=scale))


def test_nan_in_what_a_sequence_sees_reaches_its_output_and_no_other() -> None:
    case = long_case()
    first = int(case.batch.query_start_loc[4])
    case.key[first + 10] = torch.nan
    out, _ = run(case)
    rows = out.isnan().flatten(1).any(1)
    assert rows[first + 10 : first + 130].all()
    rows[first + 10 : first + 130] = False
    assert not rows.any()


@pytest.mark.parametrize(("head_dim", "v_head_dim"), [(64, 64), (40, 5)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rows_are_written_exactly_where_their_slots_say(dtype: torch.dtype, head_dim: int, v_head_dim: int) -> None:
    lengths = [(1, 20), (30, 33), (1, 1)]
    case = make_case(
        lengths=lengths,
        num_heads=6,
        num_kv_heads=3,
        head_dim=head_dim,
        v_head_dim=v_head_dim,
        block_size=7,
        dtype=dtype,
        fused=True,
    )
    backend, caches = backend_of(case), hnd(case)
    expected = [kept.clone() for kept in caches]
    for token, slot in enumerate(case.batch.slot_mapping.tolist()):
        for kept, new in zip(expected, (case.key, case.value), strict=True):
            kept[slot // 7, :, slot % 7] = new[token]
    out = torch.empty(32, 6, v_head_dim, dtype=dtype)
    backend.forward(_LAYER, case.query, case.key, case.value, caches, backend.plan(case.batch), out)
    for kept, wanted in zip(caches, expected, strict=True):
        assert torch.equal(kept.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.skipif("avx2" not in cpu_identity().split(), reason="needs an x86 CPU with AVX2")
@pytest.mark.parametrize(("machine", "isa"), [("haswell", "AVX2"), ("x86-64", "128-bit vectors")])
def test_builds_for_lesser_vectors_equal_float64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, machine: str, isa: str
) -> None:
    monkeypatch.setenv("TOKENYARD_CACHE", str(tmp_path))
    for module in (build, cache):
        monkeypatch.setattr(module, "flags_for_this_cpu", lambda: [*build.FLAGS, f"-march={machine}"])
    assert load_kernels().isa == isa
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        expect_close(long_case(dtype), replace(_LAYER, sliding_window=300, soft_cap=20.0))
        lengths = [(1, 300), (9, 40)]
        expect_close(
            make_case(
                lengths=lengths, num_heads=5, num_kv_heads=1, head_dim=23, v_head_dim=80, block_size=7, dtype=dtype
            )
        )
    test_exponentials_are_within_three_half_ulps()
    test_hyperbolic_tangents_are_within_three_half_ulps()


# ---- The arithmetic -------------------------------------------------------------------------------------------------


def applied(name: str, values: NDArray[np.float32]) -> NDArray[np.float64]:
    """One of the library's functions of a vector."""
    padded = np.resize(values, -(-len(values) // 16) * 16).astype(np.float32)
    function: Callable[..., None] = load_kernels().library[name]
    function(padded.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(padded)))
    return padded[: len(values)].astype(np.float64)


def test_exponentials_are_within_three_half_ulps() -> None:
    x = np.concatenate([np.linspace(-87.3, 0, 1_000_003), -np.logspace(-30, 1.9, 200_001)]).astype(np.float32)
    error = np.abs(applied("tokenyard_exp", x) / np.exp(x.astype(np.float64)) - 1)
    assert error.max() < 1.5 * 2**-24  # an ulp is 2 ** -23 to 2 ** -24 of a number


def test_exponentials_at_the_ends_are_zero_one_or_nan() -> None:
    x = np.array([0.0, -0.0, -87.4, -1e30, -np.inf, np.nan, 88.0], dtype=np.float32)
    found = applied("tokenyard_exp", x)
    assert found[:5].tolist() == [1, 1, 0, 0, 0]
    assert np.isnan(found[5])
    assert found[6] == pytest.approx(math.exp(88), rel=2e-7)


def test_hyperbolic_tangents_are_within_three_half_ulps() -> None:
    x = np.concatenate([np.linspace(-12, 12, 1_000_003), np.logspace(-30, 0, 100_001)]).astype(np.float32)
    exact = np.tanh(x.astype(np.float64))
    error = np.abs(applied("tokenyard_tanh", x) - exact)[exact != 0] / np.abs(exact[exact != 0])
    assert error.max() < 3 * 2**-24
    ends = np.array([-np.inf, np.inf, np.nan, 0.0, 1e30], dtype=np.float32)
    np.testing.assert_array_equal(applied("tokenyard_tanh", ends), [-1, 1, np.nan, 0, 1])


@pytest.mark.parametrize(("element_type", "dtype"), [(1, torch.bfloat16), (2, torch.float16)])
def test_numbers_are_rounded_to_16_bits_and_back_as_torch_does(element_type: int, dtype: torch.dtype) -> None:
    random = np.random.default_rng(0)
    bits = random.integers(0, 2**32, 2**20, dtype=np.uint32)  # every exponent, infinities and NaN
    halves = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype).float().numpy()
    around = np.array([65504, 65519.99, 65520, 2**-24, 2**-25, 2**-25 * 1.001, 2**-14 * 0.9999], dtype=np.float32)
    x = np.concatenate([bits.view(np.float32), halves, np.resize(around, 16), -np.resize(around, 16)])
    expected = torch.from_numpy(x).to(dtype).float().numpy()
    load_kernels().library.tokenyard_round_trip(
        x.ctypes.data_as(ctypes.c_void_p), ctypes.c_int64(len(x)), ctypes.c_int64(element_type)
    )
    np.testing.assert_array_equal(x, expected)
    assert (np.signbit(x) == np.signbit(expected))[~np.isnan(x)].all()


# ---- The bits -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 300])
def test_the_number_of_threads_changes_no_bit(dtype: torch.dtype, window: int | None) -> None:
    case, layer = long_case(dtype), replace(_LAYER, sliding_window=window)
    out, lse = run(case, layer, 1)
    for num_threads in (2, 3, 64):
        for _ in range(3):
            again, lse_again = run(case, layer, num_threads)
            assert torch.equal(again, out)
            assert torch.equal(lse_again, lse)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sequence_of_many_splits_has_the_same_bits_alone_and_in_a_batch(dtype: torch.dtype) -> None:
    case = long_case(dtype, num_heads=10)
    together, _ = run(case, num_threads=2)
    starts = case.batch.query_start_loc.tolist()
    for index, (low, high) in enumerate(pairwise(starts)):
        table = case.batch.block_table[index].tolist()
        lengths = [(case.batch.query_lens[index], case.batch.context_lens[index])]
        lone = replace(
            case,
            batch=make_batch(lengths, [table[: -(-lengths[0][1] // 16)]], 16),
            query=case.query[low:high],
            key=case.key[low:high],
            value=case.value[low:high],
        )
        assert torch.equal(run(lone)[0], together[low:high]), lengths


# ---- Threads, plans and mistakes ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_threads", "words"), [(1, "1 thread"), (2, "2 threads"), (64, "64 threads")])
def test_any_number_of_threads_works_and_is_told(num_threads: int, words: str) -> None:
    case = long_case()
    assert backend_of(case, num_threads).description.endswith(f", {words}")
    expect_close(case, num_threads=num_threads)


def test_a_plan_serves_layers_that_differ_and_outlives_a_larger_one() -> None:
    small, large = (
        make_case(lengths=[(1, n)], num_heads=2, num_kv_heads=1, head_dim=8, block_size=16) for n in (600, 5000)
    )
    backend = backend_of(small)
    plan = backend.plan(small.batch)
    backend.plan(large.batch)  # needs more room for partial results than the first has
    for window in (5, None, 300, 5):
        layer, out = replace(_LAYER, sliding_window=window), torch.empty(1, 2, 8)
        backend.forward(layer, small.query, small.key, small.value, hnd(small), plan, out)
        expected = expect_attention(small, layer)
        assert ((out.double() - expected.out).abs() <= expected.out_limit).all()


@pytest.mark.parametrize("lengths", [[(1, 40)], [(3, 40)]])
def test_a_block_or_slot_outside_of_the_cache_is_refused_before_it_is_touched(lengths: list[tuple[int, int]]) -> None:
    case = make_case(lengths=lengths, num_heads=2, num_kv_heads=1, head_dim=8, block_size=16)
    backend, out = backend_of(case), torch.empty(lengths[0][0], 2, 8)
    for bad in (-1, len(case.kv_cache[0]), 2**31 - 1):
        table = case.batch.block_table.clone()
        table[0, 1] = bad
        slots = torch.full_like(case.batch.slot_mapping, bad * 16)
        for batch, what in (
            (replace(case.batch, block_table=table), "a block"),
            (replace(case.batch, slot_mapping=slots), "a slot"),
        ):
            with pytest.raises(IndexError, match=f"{what} of this step.* lies outside of the K/V cache"):
                backend.forward(_LAYER, case.query, case.key, case.value, hnd(case), backend.plan(batch), out)


def test_a_foreign_plan_is_our_bug_and_says_so() -> None:
    case = make_case(lengths=[(1, 2)], num_heads=1, num_kv_heads=1, head_dim=8, block_size=4)
    with pytest.raises(TypeError, match="plan must come from this backend"):
        backend_of(case).forward(_LAYER, case.query, case.key, case.value, hnd(case), object(), case.query)


def test_other_devices_are_refused_and_auto_takes_it_before_torch_native() -> None:
    (descriptor,) = plugin.tokenyard_attention_backends()
    spec = spec_of(make_case(lengths=[(1, 2)], num_heads=2, num_kv_heads=1, head_dim=8, block_size=4))
    assert descriptor.supports(spec) == []
    assert descriptor.supports(replace(spec, device_type="cuda")) == ["it runs on a CPU, not on cuda"]
    assert descriptor.auto_rank is not None
    assert descriptor.auto_rank < 100
    context = AttentionBackendContext(spec=spec, device=torch.device("cpu"), num_threads=1)
    assert isinstance(descriptor.factory(descriptor.options_type(), context), CpuNativeBackend)
