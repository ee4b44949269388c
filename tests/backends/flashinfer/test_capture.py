"""Plans for CUDA graphs: what recorded launches would read stays where it is and is brought up to date."""

from __future__ import annotations

from dataclasses import replace

import fake_flashinfer as fake
import torch
from flashinfer_backends import DECODE, DECODING, MIXED, a_case, assert_right, backend_for, spec_of
from tokenyard.interfaces import AttentionBatch, AttentionLayer
from tokenyard.testing.attention import AttentionCase


def refilled(case: AttentionCase, held: AttentionBatch) -> AttentionCase:
    """`case` with the tensors of `held`, which get its contents, as a runner feeds a CUDA graph."""
    for name in ("query_start_loc", "seq_lens", "slot_mapping"):
        getattr(held, name).copy_(getattr(case.batch, name))
    batch = replace(
        case.batch, query_start_loc=held.query_start_loc, seq_lens=held.seq_lens, slot_mapping=held.slot_mapping
    )
    return replace(case, batch=batch)


LAYERS = [
    AttentionLayer(index=0, scale=0.1),
    AttentionLayer(index=1, scale=0.1, sliding_window=20, sinks=torch.linspace(-1, 1, 4)),
]


def test_a_captured_plan_serves_other_steps_of_its_size_after_an_update(calls: fake.Calls) -> None:
    first = a_case([(1, 5), (1, 40), (1, 64)])
    backend = backend_for(spec_of(first))
    plan = backend.plan_capture(replace(first.batch, max_seq_len=200))
    for layer in LAYERS:
        assert_right(backend, first, layer, plan)
    pointers = [given["paged_kv_indices_buffer"].data_ptr() for given in calls.named(f"{DECODE}.__init__")]
    for seed, lengths in enumerate([[(1, 200), (1, 1), (1, 16)], [(1, 199), (1, 198), (1, 200)]]):
        case = refilled(a_case(lengths, seed=seed), first.batch)
        backend.update_capture(plan, case.batch)
        for layer in LAYERS:
            assert_right(backend, case, layer, plan)
    assert len(calls.named(f"{DECODE}.__init__")) == len(LAYERS) == len(set(pointers))
    assert all(given["use_cuda_graph"] for given in calls.named(f"{DECODE}.__init__"))


def test_captured_plans_of_several_sizes_share_their_large_buffers(calls: fake.Calls) -> None:
    cases = [a_case([(1, 20 + index) for index in range(size)]) for size in (4, 2, 1)]
    backend, layer = backend_for(spec_of(cases[0])), LAYERS[0]
    plans = [backend.plan_capture(replace(case.batch, max_seq_len=64)) for case in cases]
    for case, plan in zip(cases, plans, strict=True):
        assert_right(backend, case, layer, plan)
    for name, method in (("paged_kv_indices_buffer", "__init__"), ("int_workspace_buffer", "reset_workspace_buffer")):
        assert len({given[name].data_ptr() for given in calls.named(f"{DECODE}.{method}")}) == 1
    for case, plan in zip(cases, plans, strict=True):
        backend.update_capture(plan, case.batch)
        assert_right(backend, case, layer, plan)


def test_a_larger_capture_leaves_the_buffers_of_earlier_ones_alone(calls: fake.Calls) -> None:
    small, large = a_case([(1, 20)]), a_case([(1, 30), (1, 64)], seed=1)
    backend, layer = backend_for(spec_of(small)), LAYERS[0]
    first = backend.plan_capture(replace(small.batch, max_seq_len=64))
    assert_right(backend, small, layer, first)
    assert_right(backend, large, layer, backend.plan_capture(replace(large.batch, max_seq_len=64)))
    backend.update_capture(first, small.batch)
    assert_right(backend, small, layer, first)


def test_plans_are_made_in_and_out_of_inference_mode(calls: fake.Calls) -> None:
    case, mixed = a_case(DECODING), a_case(MIXED)
    backend = backend_for(spec_of(case))
    with torch.inference_mode():
        plan = backend.plan_capture(case.batch)
        for layer in LAYERS:
            assert_right(backend, case, layer, plan)
        assert_right(backend, mixed, LAYERS[0])
    backend.update_capture(plan, case.batch)
    for layer in LAYERS:
        assert_right(backend, case, layer, plan)
    assert_right(backend, mixed, LAYERS[0])
