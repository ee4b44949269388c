"""The backend through a stand-in that checks every argument against the signatures of the real releases."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import pairwise
from typing import Any

import fake_flashinfer as fake
import numpy as np
import pytest
import torch
from flashinfer_backends import (
    DECODE,
    DECODING,
    DTYPE,
    GOOD,
    MIXED,
    PREFILL,
    a_case,
    assert_right,
    backend_for,
    spec_of,
    table_of,
)
from tokenyard.errors import ConfigError, PluginError
from tokenyard.interfaces import AttentionLayer
from tokenyard.testing.attention import make_batch
from tokenyard_backends.flashinfer.backend import FlashInferBackend
from tokenyard_backends.flashinfer.kernels import LayerKind

LAYER = AttentionLayer(index=0, scale=0.1)


@pytest.mark.parametrize("lengths", [MIXED, DECODING], ids=["mixed", "decoding"])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (9, None), (1, 30.0), (100, 2.0)])
def test_every_kind_of_layer_equals_float64(
    calls: fake.Calls, lengths: list[tuple[int, int]], window: int | None, soft_cap: float | None, with_sinks: bool
) -> None:
    case = a_case(lengths, fused=True)
    sinks = torch.linspace(-2, 3, 4, dtype=DTYPE) if with_sinks else None
    layer = AttentionLayer(index=0, scale=0.2, sliding_window=window, soft_cap=soft_cap, sinks=sinks)
    assert_right(backend_for(spec_of(case)), case, layer)


def test_only_steps_in_which_every_sequence_decodes_take_the_decode_kernel(calls: fake.Calls) -> None:
    for lengths, name in ((DECODING, DECODE), (MIXED, PREFILL)):
        case = a_case(lengths)
        calls.log.clear()
        assert_right(backend_for(spec_of(case)), case, AttentionLayer(index=0, scale=0.1))
        assert {called for called, _ in calls.log} == {f"{name}.{method}" for method in ("__init__", "plan", "run")}


@pytest.mark.parametrize("lengths", [MIXED, DECODING], ids=["mixed", "decoding"])
def test_layers_of_one_kind_share_a_plan_and_others_have_their_own(
    calls: fake.Calls, lengths: list[tuple[int, int]]
) -> None:
    case = a_case(lengths)
    backend = backend_for(spec_of(case))
    kinds = [AttentionLayer(index=0, scale=0.1), AttentionLayer(index=1, scale=0.1, sliding_window=8)]
    kinds += [AttentionLayer(index=2, scale=0.2), AttentionLayer(index=3, scale=0.1, soft_cap=5.0)]
    for _ in range(3):  # steps
        plan = backend.plan(case.batch)
        calls.log.clear()
        for layer in [*kinds, *(replace(kind, index=kind.index + 4) for kind in kinds)]:
            assert_right(backend, case, layer, plan)
        planned = [name for name, _ in calls.log if name.endswith(".plan")]
        assert len(planned) == len(kinds)
        assert len([name for name, _ in calls.log if name.endswith(".run")]) == 2 * len(kinds)
    assert not [name for name, _ in calls.log if name.endswith("__init__")]  # wrappers are kept from step to step


def test_kv_groups_of_one_step_have_plans_at_the_same_time(calls: fake.Calls) -> None:
    """All groups are planned before the first layer runs, and their layers alternate."""
    cases = [a_case(DECODING, seed=seed) for seed in range(3)]
    backend = backend_for(spec_of(cases[0]))
    plans = [backend.plan(case.batch) for case in cases]
    for index in range(6):
        group = index % 3
        assert_right(backend, cases[group], AttentionLayer(index=index, group=group, scale=0.1), plans[group])
    assert len(calls.named(f"{DECODE}.plan")) == 3


def test_a_plan_still_holds_after_another_one_of_its_group_ran(calls: fake.Calls) -> None:
    first, second = a_case(DECODING), a_case([(1, 90), (1, 3)], seed=1)
    backend, layer = backend_for(spec_of(first)), AttentionLayer(index=0, scale=0.1)
    plan = backend.plan(first.batch)
    assert_right(backend, first, layer, plan)
    assert_right(backend, second, layer)
    assert_right(backend, first, layer, plan)


def test_a_plan_is_told_everything_that_has_a_default(calls: fake.Calls) -> None:
    for lengths, name in ((DECODING, DECODE), (MIXED, PREFILL)):
        case = a_case(lengths)
        assert_right(backend_for(spec_of(case)), case, AttentionLayer(index=0, scale=0.3, sliding_window=8))
        (given,) = calls.named(f"{name}.plan")
        assert [given[key] for key in ("q_data_type", "kv_data_type", "o_data_type")] == [DTYPE] * 3
        assert given["window_left"] == 7  # the window counts the token itself
        assert given["sm_scale"] == 0.3
    assert given["causal"] is True


def test_blocks_that_a_window_has_left_behind_are_not_read(calls: fake.Calls) -> None:
    """Their blocks may belong to others by then; here their ids are of no block at all."""
    case = a_case([(1, 100), (3, 90)])
    table = np.array(table_of(case))
    table[:, : 80 // 16] = -1
    batch = replace(case.batch, host_block_table=table)
    layer = AttentionLayer(index=0, scale=0.1, sliding_window=8)
    assert_right(backend_for(spec_of(case)), replace(case, batch=batch), layer)


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32])
def test_every_number_of_query_heads_a_kv_head_is_decoded(calls: fake.Calls, group: int) -> None:
    case = a_case([(1, 20), (1, 3)], num_heads=2 * group)
    assert_right(backend_for(spec_of(case)), case, AttentionLayer(index=0, scale=0.1))
    (given,) = calls.named(f"{DECODE}.__init__")
    assert given["use_tensor_cores"] == (group >= 4)


@pytest.mark.parametrize("tensor_cores", [True, False])
def test_the_option_decides_which_cores_decode(calls: fake.Calls, tensor_cores: bool) -> None:
    case = a_case(DECODING)
    backend = backend_for(spec_of(case), decode_tensor_cores=tensor_cores)
    assert_right(backend, case, AttentionLayer(index=0, scale=0.1))
    assert calls.named(f"{DECODE}.__init__")[0]["use_tensor_cores"] == tensor_cores
    assert ("tensor cores" if tensor_cores else "CUDA cores") in backend.description
    assert calls.version in backend.description


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_head_size_and_data_type_that_is_claimed_runs(
    calls: fake.Calls, head_dim: int, dtype: torch.dtype
) -> None:
    for lengths in (MIXED, DECODING):
        case = a_case(lengths, head_dim=head_dim, dtype=dtype)
        assert_right(backend_for(spec_of(case)), case, AttentionLayer(index=0, scale=head_dim**-0.5))


def test_rows_beside_the_step_and_other_slots_of_the_cache_stay_as_they_were(calls: fake.Calls) -> None:
    case = a_case([(2, 5), (1, 3)])
    backend = backend_for(spec_of(case))
    cache = (case.kv_cache[0].nan_to_num(nan=7.0), case.kv_cache[1].nan_to_num(nan=7.0))
    before = [pages.clone() for pages in cache]
    backend.forward(
        LAYER, case.query, case.key, case.value, cache, backend.plan(case.batch), torch.empty_like(case.query)
    )
    slots = case.batch.slot_mapping
    for pages, old, new in zip(cache, before, (case.key, case.value), strict=True):
        assert torch.equal(pages.flatten(0, 1)[slots], new)
        others = torch.ones(pages.shape[0] * pages.shape[1], dtype=torch.bool)
        others[slots] = False
        assert torch.equal(pages.flatten(0, 1)[others], old.flatten(0, 1)[others])


def test_a_sequence_alone_gives_the_same_as_in_a_batch_up_to_the_kernels(calls: fake.Calls) -> None:
    """What we hand the kernels of a sequence does not depend on its batch mates."""
    case = a_case(MIXED)
    backend, layer = backend_for(spec_of(case)), LAYER
    assert_right(backend, case, layer)
    (together,) = calls.named(f"{PREFILL}.plan")
    bounds = together["paged_kv_indptr"].tolist()
    for index, (low, high) in enumerate(pairwise(bounds)):
        alone = make_batch([MIXED[index]], [table_of(case)[index].tolist()], 16)
        calls.log.clear()
        backend.plan(replace(alone, max_seq_len=MIXED[index][1])).attention(LayerKind.of(layer))
        (given,) = calls.named(f"{PREFILL}.plan") or calls.named(f"{DECODE}.plan")
        ids = given["paged_kv_indices"] if "paged_kv_indices" in given else given["indices"]
        assert ids.tolist() == together["paged_kv_indices"][low:high].tolist()


@pytest.mark.parametrize(
    ("message", "advice"),
    [
        ("Buffer overflow when allocating memory for tmp_v ... in AlignedAllocator.", "raise attention.workspace_mib"),
        ("Ninja build failed. Ninja output:\nFAILED: x.o", r"cannot be compiled \(Ninja build failed"),
        ("Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist", "install the CUDA toolkit"),
    ],
)
def test_a_plan_that_fails_for_a_known_reason_says_what_to_do(calls: fake.Calls, message: str, advice: str) -> None:
    case = a_case(DECODING)
    calls.plan_error = RuntimeError(message)
    with pytest.raises(ConfigError, match=advice):
        assert_right(backend_for(spec_of(case)), case, LAYER)


def test_a_plan_that_fails_for_another_reason_fails_with_it(calls: fake.Calls) -> None:
    case = a_case(DECODING)
    calls.plan_error = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory access"):
        assert_right(backend_for(spec_of(case)), case, LAYER)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workspace_mib": 0}, "attention.workspace_mib=0 must be at least 1"),
        ({"cascade_min_blocks": 0}, "attention.cascade_min_blocks=0 must be at least 1"),
        ({"prefill_kernel": "fa3"}, "fa3 needs a Hopper GPU"),
        ({"decode_tensor_cores": False}, "5 query heads a KV head"),
    ],
)
def test_an_option_that_cannot_hold_is_refused_by_name(
    calls: fake.Calls, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        backend_for(replace(GOOD, num_heads=10), **options)


def test_an_option_that_has_no_effect_is_said_to_have_none(calls: fake.Calls, caplog: pytest.LogCaptureFixture) -> None:
    backend_for(GOOD, cascade=True, cascade_min_blocks=3)
    assert not caplog.messages
    backend_for(GOOD, cascade_min_blocks=3)
    assert caplog.messages == ["attention.cascade_min_blocks=3 has no effect without attention.cascade=true"]


def test_a_package_that_cannot_be_imported_is_said_to_be_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    with pytest.raises(PluginError, match=r"cannot be imported \(ModuleNotFoundError"):
        backend_for(GOOD)


def test_foreign_plans_are_our_bug_and_say_so(calls: fake.Calls) -> None:
    case = a_case(DECODING)
    backend = backend_for(spec_of(case))
    with pytest.raises(TypeError, match="plan must come from this backend's plan"):
        backend.forward(LAYER, case.query, case.key, case.value, case.kv_cache, object(), case.query)
    with pytest.raises(TypeError, match="plan must come from this backend's plan_capture"):
        backend.update_capture(backend.plan(case.batch), case.batch)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"device_type": "cpu"}, "device type cpu"),
        ({"dtype": "float32"}, "dtype float32"),
        ({"kv_cache_dtype": "fp8"}, "fp8"),
        ({"causal": False}, "causal"),
        ({"num_heads": 5}, "5 heads"),
        ({"head_dim": 80, "v_head_dim": 80}, "head size 80"),
        ({"v_head_dim": 128}, "128 differs"),
        ({"block_size": 0}, "block size 0"),
    ],
)
def test_what_it_cannot_serve_is_refused_with_one_reason(change: dict[str, Any], word: str) -> None:
    assert FlashInferBackend.supports(GOOD) == []
    (reason,) = FlashInferBackend.supports(replace(GOOD, **change))
    assert word in reason


def test_the_layout_has_keys_and_values_apart(calls: fake.Calls) -> None:
    layout = backend_for(GOOD).kv_cache_layout(GOOD, 7)
    assert layout.key_shape == layout.value_shape == (7, 16, 2, 64)
