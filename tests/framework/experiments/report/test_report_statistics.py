"""Means over seeds and paired differences."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.experiments.report.numbers import number_text
from tokenyard.experiments.report.statistics import estimate, paired, student_t


def within(degrees: int, limit: float) -> float:
    """The probability that Student's t lies between -limit and limit, by integrating its density."""
    x = np.linspace(0.0, limit, 200_001)
    log_scale = math.lgamma((degrees + 1) / 2) - math.lgamma(degrees / 2) - 0.5 * math.log(degrees * math.pi)
    density = np.exp(log_scale - (degrees + 1) / 2 * np.log1p(x * x / degrees))
    return 2 * float(np.trapezoid(density, x))


@pytest.mark.parametrize("degrees", [*range(1, 16), 29, 120, 10_000])
def test_95_percent_of_students_t_lie_within_the_quantile(degrees: int) -> None:
    assert within(degrees, student_t(degrees)) == pytest.approx(0.95, abs=1e-5)


def test_a_mean_has_the_interval_of_a_hand_worked_example() -> None:
    found = estimate([1.0, 2.0, 3.0])
    assert (found.mean, found.count) == (2.0, 3)
    assert found.half_width == pytest.approx(4.302653 * 1.0 / math.sqrt(3))  # the deviation of 1, 2, 3 is 1


def test_one_value_has_no_interval() -> None:
    found = estimate([5.0])
    assert (found.mean, found.half_width, found.low, found.high) == (5.0, None, None, None)


def test_pairing_removes_what_seeds_have_in_common() -> None:
    base = {1: 10.0, 2: 100.0, 3: 1000.0}
    found = paired(base, {seed: value - 1.0 - 0.1 * seed for seed, value in base.items()})
    assert found is not None
    assert found.difference.mean == pytest.approx(-1.2)
    assert (found.is_significant, found.verdict) == (True, "lower")


def test_a_difference_whose_interval_contains_zero_is_not_significant() -> None:
    found = paired({1: 1.0, 2: 1.0, 3: 1.0}, {1: 0.5, 2: 1.6, 3: 1.2})
    assert found is not None
    assert (found.is_significant, found.verdict) == (False, "not significant")


def test_one_seed_gives_no_interval_and_equal_runs_are_equal() -> None:
    alone = paired({1: 1.0}, {1: 2.0})
    equal = paired({1: 0.1 + 0.2, 2: 5.0}, {1: 0.3, 2: 5.0})
    assert alone is not None
    assert equal is not None
    assert (alone.is_significant, alone.verdict) == (None, "one seed: no interval")
    assert equal.verdict == "equal"


def test_seeds_that_one_side_lacks_are_left_out() -> None:
    found = paired({1: 1.0, 2: 2.0, 9: 99.0}, {1: 2.0, 2: 3.0, 8: 0.0})
    assert found is not None
    assert (found.base, found.other, found.difference.count) == (1.5, 2.5, 2)
    assert paired({1: 1.0}, {2: 1.0}) is None


@given(st.lists(st.tuples(st.floats(0.01, 1e6), st.floats(0.01, 1e6)), min_size=2, max_size=8))
def test_swapping_the_sides_turns_the_difference_round(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = (dict(enumerate(values)) for values in zip(*pairs, strict=True))
    there, back = paired(ours, theirs), paired(theirs, ours)
    assert there is not None
    assert back is not None
    assert there.difference.mean == pytest.approx(-back.difference.mean, abs=1e-6)
    assert there.is_significant == back.is_significant
    assert there.ratio is not None
    assert back.ratio is not None
    assert there.ratio[0] * back.ratio[0] == pytest.approx(1.0)


def test_a_ratio_sees_what_seeds_of_unequal_load_hide_from_a_difference() -> None:
    base = {1: 0.2, 2: 2.0, 3: 30.0}
    found = paired(base, {1: 0.11, 2: 0.9, 3: 15.0})
    assert found is not None
    assert found.is_significant is False
    assert found.ratio is not None
    mean, low, high = found.ratio
    assert low is not None
    assert high is not None
    assert low < mean < high < 1.0


@pytest.mark.parametrize(
    ("value", "text"), [(-1e-9, "+0.000000"), (0.0, "+0"), (-0.0, "+0"), (-4.49, "-4.49"), (1159.0, "+1,159")]
)
def test_what_rounds_to_nothing_has_no_minus(value: float, text: str) -> None:
    assert number_text(value, is_signed=True) == text
