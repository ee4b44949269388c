"""Sampler: a row's token is its own: of its logits, parameters and seed, and of nobody else."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_reference import Row, distribution, drawn, is_close_call
from sampling_rows import (
    CPU,
    greedy,
    history_of,
    logits_of,
    params_of,
    positions_of,
    request_of,
    result_alone,
    results,
    sample,
    sampled_from,
)
from tokenyard.arrays import IntArray
from tokenyard.errors import ValidationError
from tokenyard.sampling_params import SamplingParams
from tokenyard.worker.sampler import SamplingBatch

V = 24
TOKENS = st.lists(st.integers(0, V - 1), max_size=8)
GRID = st.integers(-32, 32).map(lambda n: n / 8)


ANY_PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.01, 0.7, 1.0, 2.0]), "seed": st.integers(0, 2**63 - 1)},
    optional={
        "top_k": st.integers(1, V),
        "top_p": st.floats(0.01, 0.99),
        "min_p": st.floats(0.01, 1.0),
        "repetition_penalty": st.sampled_from([0.8, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-1.5, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-0.25, 0.5]),
        "logit_bias": st.dictionaries(st.integers(0, V - 1), GRID, max_size=3),
        "allowed_token_ids": TOKENS.map(lambda ids: [0, *ids]),
        "min_tokens": st.integers(0, 9),
        "logprobs": st.integers(-1, V),
    },
)


@st.composite
def any_row(draw: st.DrawFn) -> Row:
    never_stop = st.integers(1, V - 1)
    return Row(
        logits=draw(st.lists(GRID, min_size=V, max_size=V)),
        params=params_of(draw(ANY_PARAMS)),
        prompt=draw(TOKENS),
        output=draw(TOKENS),
        stop_token_ids=draw(st.lists(never_stop, max_size=2)),
        bad_words=draw(st.lists(st.tuples(TOKENS, never_stop).map(lambda word: [*word[0][:1], word[1]]), max_size=2)),
    )


def seeded(row: Row) -> Row:
    return dataclasses.replace(row, seed=row.params.seed or 0)


@settings(max_examples=300, deadline=None)
@given(st.lists(any_row().map(seeded), min_size=1, max_size=5))
def test_every_token_is_the_references(rows: list[Row]) -> None:
    found = sample(rows)
    assert found.errors == {}
    wanted = [
        distribution(row).index(1.0) if row.params.is_greedy else None if is_close_call(row) else drawn(row)
        for row in rows
    ]
    assume(any(token is not None for token in wanted))
    assert [token for token, known in zip(found.token_ids, wanted, strict=True) if known is not None] == [
        token for token in wanted if token is not None
    ]


@settings(max_examples=150, deadline=None)
@given(st.lists(any_row(), min_size=2, max_size=6), st.integers(0, 719))
def test_a_row_is_the_same_alone_and_in_any_batch_in_any_order(rows: list[Row], number: int) -> None:
    rows = [dataclasses.replace(row, params=dataclasses.replace(row.params, seed=None)) for row in rows]
    names = [f"r{index}" for index in range(len(rows))]
    alone = [result_alone(row, name) for row, name in zip(rows, names, strict=True)]
    assert results(sample(rows, request_ids=names), len(rows)) == alone
    permutations = [*itertools.permutations(range(len(rows)))]
    order = permutations[number % len(permutations)]
    mixed = sample([rows[index] for index in order], request_ids=[names[index] for index in order])
    assert results(mixed, len(rows)) == [alone[index] for index in order]


FEATURES: dict[str, dict[str, object]] = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 40},
    "top_p": {"top_p": 0.9},
    "min_p": {"min_p": 0.02},
    "repetition": {"repetition_penalty": 1.3},
    "presence": {"presence_penalty": 1.0},
    "frequency": {"frequency_penalty": 0.5},
    "bias": {"logit_bias": {3: 8.0, 599: 5.0}},
    "allowed": {"allowed_token_ids": list(range(0, 700, 3))},
    "min_tokens": {"min_tokens": 9},
    "logprobs": {"logprobs": 4},
    "all logprobs": {"logprobs": -1},
    "seed": {"seed": 11},
}


@pytest.mark.parametrize(("first", "second"), [*itertools.combinations(FEATURES, 2)])
def test_d12_every_pair_of_features_works_in_one_row_and_in_two(first: str, second: str) -> None:
    """D12. 700 tokens are neither a whole number of blocks nor all of those that are put in order at first."""
    generator = torch.Generator().manual_seed(1)
    both = [FEATURES[first], FEATURES[second], {**FEATURES[first], **FEATURES[second]}]
    rows = [
        Row(
            logits=(torch.randn(700, generator=generator) * 2).tolist(),
            params=params_of(params),
            prompt=[1, 2, 3],
            output=[599, 4, 4],
            stop_token_ids=[0, 5],
            bad_words=[[6], [4, 7]],
        )
        for params in both
    ]
    found = sample(rows)
    assert found.errors == {}
    assert results(found, 3) == [result_alone(row, f"r{index}") for index, row in enumerate(rows)]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_row_is_bitwise_the_same_in_batches_of_all_sizes_with_any_number_of_threads(num_threads: int) -> None:
    before, count = torch.get_num_threads(), 40
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(count, 30_001, generator=generator) * 3
    limits: list[dict[str, object]] = [{}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.5, "min_p": 0.01}]
    params = [params_of({"temperature": 0.9, "logprobs": 2, **limits[row % 4]}) for row in range(count)]
    requests = [request_of(Row(logits=(), params=row), f"r{index}") for index, row in enumerate(params)]

    def run(rows: slice) -> list[object]:
        batch = SamplingBatch.of(requests[rows], logits.shape[-1], CPU, 0)
        size = len(requests[rows])
        positions = np.zeros(size, dtype=np.int32)
        sampled = sampled_from(logits[rows].clone(), batch, positions, lambda _: np.empty(0, np.int32))
        return results(sampled, size)

    together = run(slice(0, count))
    torch.set_num_threads(num_threads)
    try:
        for size in (1, 3, 7, 20):
            pieces = [run(slice(start, start + size)) for start in range(0, count, size)]
            assert list(itertools.chain(*pieces)) == together
    finally:
        torch.set_num_threads(before)


def test_smp_01_a_seeded_request_is_the_same_alone_and_beside_anyone() -> None:
    logits = [math.sin(token) * 3 for token in range(V)]
    row = Row(logits=logits, params=SamplingParams(temperature=0.8, seed=42), prompt=[1])
    alone = sample([row]).token_ids[0]
    for others in ([SamplingParams()], [SamplingParams(seed=1), greedy()], [row.params] * 2, [SamplingParams(top_k=2)]):
        for engine_seed, name in ((0, "a"), (1, "b")):
            rows = [*(dataclasses.replace(row, params=params) for params in others), row]
            names = [f"{name}{index}" for index in range(len(rows))]
            assert sample(rows, engine_seed=engine_seed, request_ids=names).token_ids[-1] == alone


def tokens_over(name: str, values: Sequence[int]) -> list[int]:
    """The tokens of equal logits while one thing changes."""
    row = Row(logits=[0.0] * V, params=SamplingParams())
    found = []
    for value in values:
        seed = value if name == "seed" else 7 if name == "position" else None
        one = dataclasses.replace(
            row, params=SamplingParams(seed=seed), prompt=[0] * (value if name == "position" else 1)
        )
        engine_seed = value if name == "engine_seed" else 0
        request_id = f"r{value if name == 'request_id' else 0}"
        found.append(int(sample([one], engine_seed=engine_seed, request_ids=[request_id]).token_ids[0]))
    return found


@pytest.mark.parametrize("name", ["seed", "position", "engine_seed", "request_id"])
def test_e18_the_same_seed_gives_the_same_tokens_and_another_seed_or_position_others(name: str) -> None:
    """E18. A request without a seed has one of its id and the engine's seed: n children differ, runs do not."""
    tokens = tokens_over(name, range(40))
    assert tokens == tokens_over(name, range(40))
    assert len(set(tokens)) > 10


def test_greedy_rows_take_the_most_likely_token_and_the_first_among_equals() -> None:
    rows = [
        Row(logits=logits, params=params)
        for logits in ([1.0, 3.0, 2.0, 3.0], [-5.0, -5.0, -6.0, -5.0])
        for params in (greedy(), SamplingParams(top_k=1), greedy())
    ]
    tokens = sample(rows).token_ids.tolist()
    assert [tokens[0], tokens[2], tokens[3], tokens[5]] == [1, 1, 0, 0]
    assert tokens[1] in (1, 3)
    assert tokens[4] in (0, 1, 3)
    only_greedy = sample([rows[0], rows[3]]).token_ids
    assert only_greedy.tolist() == [1, 0]
    assert only_greedy.dtype == np.int32


@pytest.mark.parametrize(
    "params",
    [
        {},
        {"top_p": 0.1},
        {"top_k": 5},
        {"min_p": 0.5},
        {"n": 2},
        {"seed": 3},
        {"temperature": 1e-6},
        {"temperature": 1e-320},
    ],
    ids=str,
)
def test_smp_12_temperature_0_is_plain_argmax_with_any_limit(params: dict[str, float]) -> None:
    logits = [math.sin(token * 7) for token in range(V)]
    one = params_of({"temperature": 0, **params})
    assert sample([Row(logits=logits, params=one)]).token_ids.tolist() == [logits.index(max(logits))]


@pytest.mark.parametrize("scale", [1.0, 1e4, 3e38, 1e-38, 0.0])
@pytest.mark.parametrize("limits", [{}, {"top_p": 0.9}, {"top_k": 3}, {"min_p": 0.1}])
def test_smp_12_a_tiny_temperature_draws_the_most_likely_and_makes_no_nan(
    scale: float, limits: dict[str, float]
) -> None:
    params = params_of({"temperature": 1e-5, **limits})
    rows = [Row(logits=[-scale, scale, 0.5 * scale, -scale], params=params)] * 20
    found = sample(rows)
    assert found.errors == {}
    assert set(found.token_ids.tolist()) <= ({1} if scale >= 1 else {0, 1, 2, 3})


@settings(max_examples=300, deadline=None)
@given(
    st.floats() | st.sampled_from([-0.0, 1e-320, 5e-324]),
    st.sampled_from(["temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"]),
)
def test_d8_every_number_is_refused_or_sampled_with(value: float, name: str) -> None:
    try:
        params = params_of({name: value})
    except ValidationError:
        return
    found = sample([Row(logits=[1.0, -2.0, 0.0, 3e38], params=params, prompt=[0, 1], output=[2, 3])])
    assert found.errors == {}
    assert found.token_ids[0] in range(4)


def test_a_token_of_probability_0_is_never_drawn() -> None:
    logits = [-math.inf, 0.0, -math.inf, 0.0, -200.0]
    rows = [Row(logits=logits, params=SamplingParams(temperature=2.0))] * 2000
    assert set(sample(rows).token_ids.tolist()) == {1, 3}


def test_a_logits_processor_sees_biased_logits_and_the_output_and_runs_before_the_penalties() -> None:
    seen: list[tuple[list[float], list[int], bool]] = []

    def processor(logits: torch.Tensor, output: IntArray) -> None:
        seen.append((logits.tolist(), output.tolist(), output.flags.writeable))
        logits[2] = 1.5

    params = greedy(logit_bias={0: 1.0}, presence_penalty=2.0, allowed_token_ids=[0, 1, 2], logprobs=0)
    row = Row(logits=[0.0, 1.25, 0.5, 9.0], params=params, prompt=[1, 1], output=[2, 0])
    found = sample([row, row], processors=[processor, None])
    assert seen == [([1.0, 1.25, 0.5, -math.inf], [2, 0], False)]
    assert found.token_ids.tolist() == [1, 1]
    assert found.logprobs is not None
    assert found.logprobs.logprobs[0, 0] == found.logprobs.logprobs[1, 0]


def test_what_no_row_asks_for_has_no_columns_and_asks_for_no_history() -> None:
    rows = [Row(logits=[0.0, 1.0], params=params, stop_token_ids=[1]) for params in (SamplingParams(), greedy())]
    batch = SamplingBatch.of([request_of(row, "r") for row in rows], 2, CPU, 0)
    assert all(getattr(batch.edits, field.name) is None for field in dataclasses.fields(batch.edits))
    assert batch.logprobs is None
    assert batch.drawn is not None
    assert batch.drawn.limits is None
    assert SamplingBatch.of([request_of(rows[1], "r")], 2, CPU, 0).drawn is None

    def no_history(row: int) -> IntArray:
        raise LookupError(row)

    assert sampled_from(logits_of(rows), batch, positions_of(rows), no_history).token_ids[1] == 1


def test_columns_serve_every_step_until_the_batch_changes() -> None:
    params = SamplingParams(min_tokens=2, repetition_penalty=1.5, frequency_penalty=0.5, top_p=0.9, logprobs=1)
    row = Row(logits=[math.sin(token) for token in range(V)], params=params, prompt=[1, 2], stop_token_ids=[3])
    batch = SamplingBatch.of([request_of(row, "r0")], V, CPU, 0)
    output: list[int] = []
    for _ in range(12):
        now = dataclasses.replace(row, output=list(output))
        found = sampled_from(logits_of([now]), batch, positions_of([now]), history_of([now]))
        assert results(found, 1) == [result_alone(now, "r0")]
        output.append(int(found.token_ids[0]))
    assert len(set(output)) > 3
