"""min_p, top_k and top_p: who may be drawn, whichever way the floors are found."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from sampling_reference import Row, distribution, is_close_call
from sampling_rows import CPU, draws
from tokenyard.sampling_params import SamplingParams
from tokenyard.worker.sampling.limits import Limits
from tokenyard.worker.sampling.running_sums import softmax_


def let_in(logits: torch.Tensor, params: list[SamplingParams]) -> list[set[int]]:
    """The tokens of each row that may be drawn."""
    temperatures = torch.tensor([[row.temperature] for row in params])
    probabilities = softmax_(logits / temperatures)
    limits = Limits.of(params, logits.shape[-1], CPU)
    if limits is not None:
        limits.apply(probabilities)
    return [set(row.nonzero().squeeze(-1).tolist()) for row in probabilities]


def random_logits(num_rows: int, vocab_size: int, scale: float, step: float = 0.0) -> torch.Tensor:
    """Normal; rounded to multiples of `step`, many are equal."""
    logits = torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(0)) * scale
    return (logits / step).round() * step if step else logits


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=1), {3}),
        (SamplingParams(top_k=2), {3, 2}),
        (SamplingParams(top_k=-1), {0, 1, 2, 3}),
        (SamplingParams(top_k=2**31 - 1), {0, 1, 2, 3}),
        (SamplingParams(top_p=0.5), {3}),
        (SamplingParams(top_p=0.8), {3, 2}),
        (SamplingParams(top_p=0.05), {3}),
        (SamplingParams(top_p=1e-320), {3}),
        (SamplingParams(top_p=1 - 2**-53), {0, 1, 2, 3}),
        (SamplingParams(min_p=0.4), {3, 2}),
        (SamplingParams(min_p=1.0), {3}),
        (SamplingParams(min_p=1e-320), {0, 1, 2, 3}),
        (SamplingParams(top_k=3, top_p=0.9), {3, 2, 1}),
        # 0.6 of all tokens, but 0.71 of the two that top_k or min_p leaves: top_p comes last.
        (SamplingParams(top_k=2, top_p=0.65), {3}),
        (SamplingParams(min_p=0.4, top_p=0.65), {3}),
        # At temperature 2 the first is 0.4 of them: temperature comes first.
        (SamplingParams(temperature=2.0, top_p=0.5), {3, 2}),
    ],
)
def test_limits_keep_exactly_their_tokens(params: SamplingParams, allowed: set[int]) -> None:
    logits = torch.tensor([[0.05, 0.1, 0.25, 0.6]]).log()
    assert let_in(logits, [params]) == [allowed]
    assert set(draws(Row(logits=logits[0].tolist(), params=params), 400)) == allowed


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_k=1), {0, 2}),
        (SamplingParams(top_k=3), {0, 1, 2, 4, 5}),
        (SamplingParams(top_p=0.3), {0, 2}),
        (SamplingParams(top_p=0.8), {0, 1, 2, 4, 5}),
        (SamplingParams(min_p=1.0), {0, 2}),
    ],
)
def test_equally_likely_tokens_stay_together(params: SamplingParams, allowed: set[int]) -> None:
    """0.3 0.12 0.3 0.04 0.12 0.12."""
    logits = torch.tensor([[0.3, 0.12, 0.3, 0.04, 0.12, 0.12]]).log()
    assert let_in(logits, [params]) == [allowed]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=2, max_size=40),
    st.sampled_from([0.5, 0.7, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 5, 39]),
    st.just(1.0) | st.floats(0.01, 0.99),
    st.just(0.0) | st.floats(0.001, 1.0),
)
def test_who_is_let_in_is_what_the_reference_lets_in(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    row = Row(logits=logits, params=params)
    assume(not is_close_call(row))
    wanted = {token for token, probability in enumerate(distribution(row)) if probability}
    assert let_in(torch.tensor([logits]), [params]) == [wanted]


LIMITS = [
    SamplingParams(top_p=0.2),
    SamplingParams(top_p=0.999),  # needs the whole vocabulary in order
    SamplingParams(top_k=7),
    SamplingParams(top_k=2900),
    SamplingParams(top_k=600, top_p=0.7),
    SamplingParams(top_k=40, top_p=0.9),
    SamplingParams(min_p=0.01, top_p=0.9),
    SamplingParams(min_p=1e-9, top_p=0.5),
    SamplingParams(min_p=0.2),
    SamplingParams(),
]


@pytest.mark.parametrize("step", [0.0, 0.5], ids=["all different", "many equal"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_it_makes_no_difference_how_many_tokens_are_put_in_order_at_first(scale: float, step: float) -> None:
    logits = random_logits(len(LIMITS), 3000, scale, step)
    limits = Limits.of(LIMITS, 3000, CPU)
    assert limits is not None
    assert limits.ranking is not None
    outcomes = []
    for width in (1, 2, 39, 512, 2999, 3000):
        probabilities = softmax_(logits.clone())
        dataclasses.replace(limits, ranking=dataclasses.replace(limits.ranking, width=width)).apply(probabilities)
        outcomes.append(probabilities)
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)


@pytest.mark.parametrize("step", [0.0, 0.5], ids=["all different", "many equal"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 4.0])
def test_a_row_is_limited_alone_as_in_any_batch(scale: float, step: float) -> None:
    logits = random_logits(len(LIMITS), 3000, scale, step)
    together = let_in(logits, LIMITS)
    assert together == [let_in(logits[row : row + 1], [params])[0] for row, params in enumerate(LIMITS)]
    assert together[::-1] == let_in(logits.flip(0), LIMITS[::-1])


@pytest.mark.parametrize(
    ("params", "allowed"),
    [
        (SamplingParams(top_p=0.5), 1),
        (SamplingParams(top_p=0.75), 2),
        (SamplingParams(top_p=0.7500001), 4),
        (SamplingParams(top_k=2, top_p=2 / 3), 1),
        (SamplingParams(min_p=0.25), 4),
        (SamplingParams(min_p=0.2500001), 2),
        (SamplingParams(min_p=0.5), 2),
    ],
)
def test_a_limit_that_is_reached_exactly_is_reached(params: SamplingParams, allowed: int) -> None:
    probabilities = torch.tensor([[0.5, 0.25, 0.125, 0.125]])
    limits = Limits.of([params], 4, CPU)
    assert limits is not None
    limits.apply(probabilities)
    assert int((probabilities > 0).sum()) == allowed


def test_equals_of_the_kth_count_as_a_whole_however_many_they_are() -> None:
    """0.3 is not half of all, though it is of the first hundreds."""
    probabilities = torch.tensor([[0.3, *[0.7 / 2999] * 2999]])
    assert let_in(probabilities.log(), [SamplingParams(top_k=2, top_p=0.5)]) == [set(range(3000))]


def test_top_k_alone_drops_nothing_more_beside_a_row_with_top_p() -> None:
    """float32 probabilities may add up to a little more than 1."""
    probabilities = torch.tensor([[1.0, 2.0**-20, 0.0, 0.0]] * 2)
    limits = Limits.of([SamplingParams(top_k=3), SamplingParams(top_p=0.5)], 4, CPU)
    assert limits is not None
    limits.apply(probabilities)
    assert probabilities.tolist() == [[1.0, 2.0**-20, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


def test_limits_of_one_row_leave_the_others_alone() -> None:
    params = [SamplingParams(top_k=1) if row % 2 else SamplingParams() for row in range(20)]
    assert [len(tokens) for tokens in let_in(torch.randn(20, 50), params)] == [50, 1] * 10


def test_a_batch_without_limits_has_none() -> None:
    assert Limits.of([SamplingParams(), SamplingParams(top_k=50, top_p=1.0)], 50, CPU) is None
