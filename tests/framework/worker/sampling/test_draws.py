"""Random numbers from a seed and a position, and the token that a number stands for."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling_reference import uniform
from tokenyard.sampling_params import SamplingParams
from tokenyard.worker.input_batch import SampledRequest
from tokenyard.worker.sampling.draws import Streams, pick, request_seed
from tokenyard.worker.sampling.running_sums import RunningSums, softmax_

LAST = 1 - 2.0**-53  # the greatest uniform


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 1)), min_size=1, max_size=9))
def test_a_number_depends_on_its_seed_and_position_only(pairs: list[tuple[int, int]]) -> None:
    seeds, positions = zip(*pairs, strict=True)
    numbers = Streams(seeds).uniforms(np.array(positions, dtype=np.int32)).tolist()
    assert numbers == [uniform(seed, position) for seed, position in pairs]
    assert all(0 <= number <= LAST for number in numbers)


def kolmogorov(numbers: np.ndarray) -> float:
    """The distance from even, in units in which 2.3 is p = 5e-5."""
    ordered, count = np.sort(numbers), len(numbers)
    return float(np.abs(ordered - (np.arange(count) + 0.5) / count).max() * np.sqrt(count))


def test_numbers_are_even_over_seeds_and_over_positions_and_neighbours_have_nothing_in_common() -> None:
    positions = np.arange(20_000, dtype=np.int32)
    over_seeds = Streams(range(20_000)).uniforms(np.full(20_000, 7, dtype=np.int32))
    over_positions = Streams([42] * 20_000).uniforms(positions)
    next_positions = Streams([42] * 20_000).uniforms(positions + 1)
    next_seeds = Streams([43] * 20_000).uniforms(positions)
    for numbers in (
        over_seeds,
        over_positions,
        (over_positions - next_positions) % 1,
        (over_positions - next_seeds) % 1,
    ):
        assert kolmogorov(numbers) < 2.3
    for other in (next_positions, next_seeds):
        assert abs(np.corrcoef(over_positions, other)[0, 1]) < 0.03


def test_a_request_without_a_seed_has_one_of_its_id_and_the_engine() -> None:
    def seed(engine_seed: int, request_id: str, given: int | None = None) -> int:
        return request_seed(engine_seed, SampledRequest(request_id, SamplingParams(seed=given), 1, ()))

    assert seed(0, "a", 5) == seed(1, "b", 5) == 5
    assert seed(0, "a") == 16563745722614342077  # of no process, no hash seed, no version
    assert len({seed(engine, name) for engine in range(50) for name in "abcdefgh\ud800"}) == 450


def weights_of(probabilities: list[float]) -> torch.Tensor:
    return softmax_(torch.tensor([probabilities]).log())


@settings(deadline=None)
@given(st.lists(st.sampled_from([0.0, 1e-30, 1e-12, 1e-3, 1.0, 3.0]), min_size=1, max_size=700), st.floats(0, LAST))
def test_a_number_stands_for_the_token_at_which_the_exact_sum_passes_it(values: list[float], number: float) -> None:
    if not any(values):
        values[0] = 1.0
    weights = weights_of(values)
    exact = [Fraction(weight) for weight in weights[0].tolist()]
    total = float(sum(exact))
    assert Fraction(total) == sum(exact)
    for one in {0.0, number, LAST}:
        (token,) = pick(weights, torch.tensor([one], dtype=torch.float64)).tolist()
        target = Fraction(one * total)
        assert sum(exact[:token]) <= target < sum(exact[: token + 1])
        assert exact[token] > 0


@pytest.mark.parametrize("vocab_size", [1, 2, 255, 256, 257, 511, 512, 1000])
def test_every_token_can_be_drawn_and_only_those_of_the_vocabulary(vocab_size: int) -> None:
    weights = softmax_(torch.zeros(vocab_size, vocab_size))
    numbers = (torch.arange(vocab_size, dtype=torch.float64) + 0.5) / vocab_size
    assert pick(weights, numbers).tolist() == list(range(vocab_size))
    assert pick(weights, torch.full((vocab_size,), LAST, dtype=torch.float64)).tolist() == [vocab_size - 1] * vocab_size


def test_a_sum_that_is_never_exceeded_is_nowhere() -> None:
    sums = RunningSums(weights_of([1.0] * 300))
    assert sums.first_above(sums.totals).tolist() == [300]
    assert sums.first_above(torch.nextafter(sums.totals, torch.zeros(1, dtype=torch.float64))).tolist() == [299]


def test_weights_that_are_no_numbers_give_some_token_of_the_vocabulary() -> None:
    for weight in (float("nan"), 0.0):
        assert pick(torch.full((1, 300), weight), torch.tensor([0.5], dtype=torch.float64)).item() in range(300)


def test_what_a_draw_can_see_is_not_rounded_away() -> None:
    """The grid of probabilities is 2**-52: a token of probability 2**-50 keeps it."""
    found = softmax_(torch.tensor([[0.0, -50 * math.log(2)]]))
    assert found[0, 1] == pytest.approx(2.0**-50, rel=0.3, abs=0)
