"""Fitting a latency model: nonnegative least squares, and steps with known costs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.errors import UserError
from tokenyard.experiments.fit import MeasuredStep, errors_of, fit_steps
from tokenyard.experiments.nnls import nonnegative_least_squares
from tokenyard.interfaces.latency import StepLoad
from tokenyard.latency_fit import Fit, LatencyFit


@given(seed=st.integers(0, 2**32 - 1), num_columns=st.integers(1, 8), scale=st.sampled_from([1e-6, 1.0, 1e6]))
def test_no_coefficient_is_negative_and_none_could_be_changed_for_the_better(
    seed: int, num_columns: int, scale: float
) -> None:
    """The conditions of Karush, Kuhn and Tucker."""
    rng = np.random.default_rng(seed)
    matrix, target = rng.normal(size=(20, num_columns)), rng.normal(size=20)
    matrix[:, 0] *= scale
    found = nonnegative_least_squares(matrix, target)
    gradient = matrix.T @ (target - matrix @ found) / np.linalg.norm(matrix, axis=0)
    assert (found >= 0).all()
    assert (gradient <= 1e-7).all()
    assert np.abs(gradient[found > 0]).max(initial=0.0) <= 1e-7


def test_columns_that_say_the_same_or_nothing_are_no_trouble() -> None:
    matrix = np.array([[1.0, 1.0, 0.0], [2.0, 2.0, 0.0]])
    found = nonnegative_least_squares(matrix, np.array([3.0, 6.0]))
    assert matrix @ found == pytest.approx([3.0, 6.0])
    assert (found >= 0).all()


TRUTH = Fit(
    per_step=0.004,
    token_knots=(0, 4, 64),
    per_token=(0.0, 1e-4, 3e-4),
    per_decode=2e-4,
    per_prefill=5e-4,
    per_decode_context_token=1e-6,
    per_prefill_pair=2e-7,
)


@dataclass
class Loads:
    """Random steps, mixed as an engine's are."""

    rng: np.random.Generator

    def one(self) -> StepLoad:
        decodes = int(self.rng.integers(0, 40)) if self.rng.random() < 0.8 else 0
        prefills = int(self.rng.integers(0 if decodes else 1, 4))
        tokens = int(prefills * self.rng.integers(1, 200))
        context = int(self.rng.integers(0, 500) * decodes)
        return StepLoad(decodes, context, prefills, tokens, int(prefills * self.rng.integers(0, 300)))

    def steps(self, count: int, noise: float = 0.0) -> list[MeasuredStep]:
        model = LatencyFit(TRUTH)
        loads = [self.one() for _ in range(count)]
        return [MeasuredStep(load, model.seconds(load) * (1 + noise * self.rng.normal())) for load in loads]


def test_what_steps_cost_is_found_again_in_steps_that_were_not_fitted() -> None:
    loads = Loads(np.random.default_rng(0))
    fit = fit_steps(loads.steps(400))
    errors = errors_of(fit, loads.steps(200))
    assert errors.num_steps == 200
    assert errors.mean < 0.002
    assert abs(errors.total) < 0.001
    assert fit.per_decode_context_token == pytest.approx(1e-6, rel=0.05)


def test_noise_makes_the_fit_neither_too_long_nor_too_short() -> None:
    loads = Loads(np.random.default_rng(1))
    errors = errors_of(fit_steps(loads.steps(800, noise=0.2)), loads.steps(300))
    assert abs(errors.total) < 0.02
    assert errors.mean < 0.05


def test_a_few_steps_that_were_disturbed_change_little() -> None:
    loads = Loads(np.random.default_rng(2))
    steps = loads.steps(400, noise=0.03)
    disturbed = [step._replace(seconds=step.seconds * (40 if at % 50 == 0 else 1)) for at, step in enumerate(steps)]
    assert abs(errors_of(fit_steps(disturbed), loads.steps(200)).total) < 0.02


def test_errors_are_shares_of_what_was_measured() -> None:
    load = StepLoad(num_decodes=1)
    fit = Fit(
        per_step=0.3,
        token_knots=(0,),
        per_token=(0.0,),
        per_decode=0.0,
        per_prefill=0.0,
        per_decode_context_token=0.0,
        per_prefill_pair=0.0,
    )
    errors = errors_of(fit, [MeasuredStep(load, 0.1), MeasuredStep(load, 0.3), MeasuredStep(load, 0.6)])
    assert (errors.mean, errors.median) == (pytest.approx((2 + 0 + 0.5) / 3), pytest.approx(0.5))
    assert errors.total == pytest.approx(0.9 / 1.0 - 1)


def test_nothing_measured_is_one_clear_error() -> None:
    with pytest.raises(UserError, match="no step was measured; give more --seconds"):
        fit_steps([])
    with pytest.raises(UserError, match="no step was left"):
        errors_of(TRUTH, [])
