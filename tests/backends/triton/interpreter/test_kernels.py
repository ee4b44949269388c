"""What is particular to these kernels: splits, tiles, padding, recorded steps. The suite has what all backends owe."""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
import triton_bf16
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenyard.errors import ConfigError
from tokenyard.interfaces import AttentionBackendContext, AttentionLayer, AttentionSpec
from tokenyard.testing.attention import AttentionCase, expect_attention, make_batch, make_case
from tokenyard_backends.triton.backend import TritonBackend
from tokenyard_backends.triton.plan import MAX_SPLITS
from tokenyard_backends.triton.plugin import TritonOptions
from tokenyard_backends.triton.tiles import Tile, Tiles
from triton.runtime.interpreter import InterpreterBuilder

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SMALL_TILES = Tiles(Tile(16, 16, 4, 2), Tile(32, 16, 4, 2))


def backend_of(case: AttentionCase, split_tokens: int = 32, tiles: Tiles | None = None) -> TritonBackend:
    keys, values = case.kv_cache
    spec = AttentionSpec(
        device_type="cpu",
        dtype=str(keys.dtype).removeprefix("torch."),
        num_heads=case.query.shape[1],
        num_kv_heads=keys.shape[2],
        head_dim=keys.shape[3],
        v_head_dim=values.shape[3],
        block_size=keys.shape[1],
    )
    assert TritonBackend.supports(spec) == []
    context = AttentionBackendContext(spec=spec, device=torch.device("cpu"), num_threads=1)
    return TritonBackend(TritonOptions(split_tokens=split_tokens), context, tiles)


def run(
    backend: TritonBackend, case: AttentionCase, layer: AttentionLayer, plan: object = None
) -> tuple[torch.Tensor, torch.Tensor]:
    out = torch.full((*case.query.shape[:2], case.value.shape[2]), torch.nan, dtype=case.query.dtype)
    lse = torch.full(case.query.shape[:2], torch.nan)
    cache = (case.kv_cache[0].clone(), case.kv_cache[1].clone())
    plan = backend.plan(case.batch) if plan is None else plan
    backend.forward(layer, case.query, case.key, case.value, cache, plan, out, lse)
    return out, lse


def check(case: AttentionCase, layer: AttentionLayer, found: tuple[torch.Tensor, torch.Tensor]) -> None:
    expected = expect_attention(case, layer)
    for actual, wanted, limit in zip(found, expected[:2], expected[2:], strict=True):
        excess = (actual.double() - wanted).abs() - limit
        assert (excess <= 0).all(), f"off by {excess.nan_to_num(math.inf).max()} more than {limit.max()}"


def layer_of(case: AttentionCase, window: int | None = None, soft_cap: float | None = None, sinks: float | None = None):
    num_heads = case.query.shape[1]
    logits = None if sinks is None else torch.linspace(-sinks, sinks, num_heads).to(case.query.dtype)
    return AttentionLayer(
        index=0, scale=case.query.shape[2] ** -0.5, sliding_window=window, soft_cap=soft_cap, sinks=logits
    )


lengths_strategy = st.lists(
    st.one_of(
        st.integers(1, 150).map(lambda context: (1, context)),
        st.tuples(st.integers(2, 50), st.integers(0, 60)).map(lambda pair: (pair[0], sum(pair))),
    ),
    min_size=1,
    max_size=4,
)


@st.composite
def cases(draw: st.DrawFn) -> AttentionCase:
    num_kv_heads = draw(st.sampled_from([1, 2, 3]))
    head_dim = draw(st.sampled_from([8, 24, 64, 80, 128]))
    return make_case(
        lengths=draw(lengths_strategy),
        num_heads=num_kv_heads * draw(st.sampled_from([1, 2, 3, 7, 8])),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        v_head_dim=draw(st.sampled_from([head_dim, 16, 40])),
        block_size=draw(st.sampled_from([1, 5, 16, 24, 64])),
        dtype=draw(st.sampled_from(DTYPES)),
        seed=draw(st.integers(0, 999)),
        fused=draw(st.booleans()),
    )


@st.composite
def attempts(draw: st.DrawFn) -> tuple[AttentionCase, AttentionLayer, TritonBackend]:
    case = draw(cases())
    window = draw(st.one_of(st.none(), st.integers(1, 90)))
    soft_cap = draw(st.one_of(st.none(), st.sampled_from([0.5, 30.0])))
    sinks = draw(st.one_of(st.none(), st.sampled_from([0.0, 4.0])))
    split_tokens = draw(st.sampled_from([1, 16, 48, 256]))
    tiles = draw(st.sampled_from([None, SMALL_TILES]))
    return case, layer_of(case, window, soft_cap, sinks), backend_of(case, split_tokens, tiles)


QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]


@given(attempt=attempts())
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=QUIET)
def test_any_shape_split_and_tile_equals_float64(attempt: tuple[AttentionCase, AttentionLayer, TritonBackend]) -> None:
    case, layer, backend = attempt
    check(case, layer, run(backend, case, layer))


@pytest.mark.slow
@given(attempt=attempts())
@settings(max_examples=60, deadline=None, suppress_health_check=QUIET)
def test_many_shapes_splits_and_tiles_equal_float64(
    attempt: tuple[AttentionCase, AttentionLayer, TritonBackend],
) -> None:
    case, layer, backend = attempt
    check(case, layer, run(backend, case, layer))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_sequence_alone_gives_the_same_bits_as_in_any_batch(dtype: torch.dtype) -> None:
    lengths = [(1, 3), (1, 33), (1, 100), (7, 40), (1, 70), (40, 40)]
    case = make_case(lengths=lengths, num_heads=6, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    layer = layer_of(case, window=60, sinks=1.0)
    together = run(backend_of(case), case, layer)
    starts = case.batch.query_start_loc
    for index in range(len(lengths)):
        rows = slice(int(starts[index]), int(starts[index + 1]))
        batch = replace(
            make_batch([lengths[index]], [[0] * 100], 16),
            block_table=case.batch.block_table[index : index + 1],
            slot_mapping=case.batch.slot_mapping[rows],
        )
        alone = replace(case, batch=batch, query=case.query[rows], key=case.key[rows], value=case.value[rows])
        for found, wanted in zip(run(backend_of(alone), alone, layer), together, strict=True):
            assert torch.equal(found, wanted[rows]), lengths[index]


@pytest.mark.parametrize("window", [None, 130])
def test_a_context_longer_than_all_splits_together_grows_them(window: int | None) -> None:
    contexts = [MAX_SPLITS * 4 + 1, MAX_SPLITS * 4, MAX_SPLITS * 16 + 1]  # all of its splits, and none too many
    case = make_case(
        lengths=[(1, context) for context in contexts], num_heads=2, num_kv_heads=1, head_dim=16, block_size=16
    )
    layer = layer_of(case, window)
    check(case, layer, run(backend_of(case, 4, SMALL_TILES), case, layer))


def test_a_head_group_larger_than_a_tile_is_cut() -> None:
    case = make_case(lengths=[(1, 30), (5, 20)], num_heads=71, num_kv_heads=1, head_dim=16, block_size=16)
    check(case, layer_of(case), run(backend_of(case, tiles=SMALL_TILES), case, layer_of(case)))


def test_heads_that_lie_apart_are_brought_together() -> None:
    """The contract says that they lie one after the other; not every caller keeps it."""
    case = make_case(lengths=[(1, 9), (4, 7)], num_heads=4, num_kv_heads=2, head_dim=16, block_size=4)
    apart = {
        name: getattr(case, name).transpose(0, 1).contiguous().transpose(0, 1) for name in ("query", "key", "value")
    }
    check(case, layer_of(case), run(backend_of(case), replace(case, **apart), layer_of(case)))


def test_a_prompts_window_ends_where_it_should() -> None:
    """To the token, in the first tile of a row and in later ones."""
    case = make_case(lengths=[(37, 80), (2, 3)], num_heads=3, num_kv_heads=1, head_dim=16, block_size=4)
    for window in (1, 2, 15, 16, 17, 40):
        layer = layer_of(case, window)
        check(case, layer, run(backend_of(case, tiles=SMALL_TILES), case, layer))


def test_a_token_without_a_slot_is_not_written() -> None:
    case = make_case(lengths=[(1, 5), (1, 9)], num_heads=3, num_kv_heads=3, head_dim=80, block_size=4)
    slots = case.batch.slot_mapping.clone()
    slots[1] = -1
    cache = tuple(torch.full_like(tensor, 7) for tensor in case.kv_cache)
    out = torch.empty(2, 3, 80)
    backend = backend_of(case)
    plan = backend.plan(replace(case.batch, slot_mapping=slots))
    backend.forward(layer_of(case), case.query, case.key, case.value, cache, plan, out)  # type: ignore[arg-type]
    for tensor, new in zip(cache, (case.key, case.value), strict=True):
        rows = tensor.flatten(0, 1)
        assert torch.equal(rows[int(slots[0])], new[0])
        rows[int(slots[0])] = 7
        assert (rows == 7).all()


def test_a_recorded_plan_serves_later_steps_of_other_lengths() -> None:
    """Its tensors keep their addresses and get new contents; grids were made for the longest."""
    steps = [[(1, 300), (1, 1), (1, 40)], [(1, 2), (1, 257), (1, 1)], [(1, 31), (1, 32), (1, 33)]]
    first, *later = [
        make_case(lengths=lengths, num_heads=4, num_kv_heads=2, head_dim=32, block_size=16, seed=seed)
        for seed, lengths in enumerate(steps)
    ]
    width = max(case.batch.block_table.shape[1] for case in (first, *later))
    table = torch.zeros(3, width, dtype=torch.int32)
    backend = backend_of(first)
    recorded = replace(first.batch, block_table=table, max_seq_len=300)
    plan = backend.plan_capture(recorded)
    for case in (first, *later):
        table[:, : case.batch.block_table.shape[1]] = case.batch.block_table
        for name in ("seq_lens", "query_start_loc", "slot_mapping"):
            getattr(recorded, name).copy_(getattr(case.batch, name))
        backend.update_capture(plan, case.batch)
        for window in (None, 20):
            layer = layer_of(case, window)
            check(case, layer, run(backend, case, layer, plan))


def test_plans_that_are_alive_together_do_not_share_what_they_name() -> None:
    """A longer step's buffers may be shared, one step after the other; the sequences of each stay its own."""
    case = make_case(lengths=[(1, 70)] * 3, num_heads=2, num_kv_heads=1, head_dim=16, block_size=16)
    small = make_case(lengths=[(1, 90), (4, 9)], num_heads=2, num_kv_heads=1, head_dim=16, block_size=16)
    backend = backend_of(case)
    plans = [backend.plan(case.batch), backend.plan(small.batch)]
    for each, plan in ((case, plans[0]), (small, plans[1]), (case, plans[0])):
        check(each, layer_of(each), run(backend, each, layer_of(each), plan))


@pytest.mark.parametrize("sink", [-math.inf, -300.0, 300.0])
def test_extreme_sinks_take_all_or_nothing(sink: float) -> None:
    case = make_case(lengths=[(1, 70), (3, 5)], num_heads=2, num_kv_heads=1, head_dim=16, block_size=16)
    layer = replace(layer_of(case), sinks=torch.full((2,), sink))
    check(case, layer, run(backend_of(case), case, layer))


def test_a_soft_cap_far_above_the_scores_changes_them_by_rounding_alone() -> None:
    """tanh near zero, where 1 - exp would lose its digits."""
    case = make_case(lengths=[(1, 60), (9, 30)], num_heads=2, num_kv_heads=2, head_dim=64, block_size=16)
    capped, plain = (run(backend_of(case), case, layer_of(case, soft_cap=cap)) for cap in (1e6, None))
    torch.testing.assert_close(capped, plain, rtol=1e-5, atol=1e-5)


def test_a_foreign_plan_is_our_bug_and_says_so() -> None:
    case = make_case(lengths=[(1, 2)], num_heads=1, num_kv_heads=1, head_dim=8, block_size=4)
    with pytest.raises(TypeError, match="plan must come from this backend"):
        run(backend_of(case), case, layer_of(case), object())


def test_splits_of_no_tokens_are_refused() -> None:
    case = make_case(lengths=[(1, 2)], num_heads=1, num_kv_heads=1, head_dim=8, block_size=4)
    with pytest.raises(ConfigError, match=r"attention\.split_tokens=0 is below 1"):
        backend_of(case, 0)


def test_an_interpreter_that_multiplies_bfloat16_wrongly_is_not_used_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InterpreterBuilder, "create_dot", triton_bf16.STOCK_DOT)
    for dtype in DTYPES:
        case = make_case(lengths=[(1, 2)], num_heads=1, num_kv_heads=1, head_dim=8, block_size=4, dtype=dtype)
        refused = dtype == torch.bfloat16
        expected = pytest.raises(ConfigError, match=r"use model\.dtype=float32") if refused else nullcontext()
        with expected:
            backend_of(case)


def test_it_says_that_it_is_interpreted() -> None:
    case = make_case(lengths=[(1, 2)], num_heads=1, num_kv_heads=1, head_dim=8, block_size=4)
    assert backend_of(case).description.endswith(", interpreted")
