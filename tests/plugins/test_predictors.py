"""The output-length predictors that ship: what each says, and what it may be told."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard import PolicyDescriptor
from tokenyard.errors import ConfigError, PluginError, ValidationError
from tokenyard.interfaces import (
    OutputLengthPredictor,
    PredictorContext,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    StepOutcome,
)
from tokenyard.launch.compose import load_engine_config
from tokenyard.testing import EngineHarness, PredictorContract, catalogue_with
from tokenyard_plugins import predictor_noisy, predictor_oracle

PREDICTORS = ("max_tokens", "oracle", "noisy", "prompt", "{name: prompt, learning_rate: 0.5}")


class TestMaxTokens(PredictorContract):
    overrides = ("scheduler.predictor=max_tokens",)


class TestOracle(PredictorContract):
    overrides = ("scheduler.predictor=oracle",)


class TestNoisy(PredictorContract):
    overrides = ("scheduler.predictor={name: noisy, sigma: 1.5}",)


class TestNoisyWithoutNoise(PredictorContract):
    overrides = ("scheduler.predictor={name: noisy, sigma: 0}",)


class TestPrompt(PredictorContract):
    overrides = ("scheduler.predictor={name: prompt, ratio: 0.5, offset: 3}",)


class TestPromptThatLearns(PredictorContract):
    overrides = ("scheduler.predictor={name: prompt, learning_rate: 0.3}",)


class Asking(SchedulingPolicy):
    """Notes what the predictor says of each request before it is in line, and of those that live after each step."""

    def __init__(self) -> None:
        self.said: dict[str, list[float]] = {}
        self.predictor: OutputLengthPredictor | None = None

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        self._ask(request, view)
        return ()

    def on_step(self, outcomes: Sequence[StepOutcome], view: SchedulerView) -> None:
        for outcome in outcomes:
            if not outcome.is_finished:
                self._ask(outcome.request, view)

    def _ask(self, request: RequestView, view: SchedulerView) -> None:
        self.predictor = view.predictor
        self.said.setdefault(request.request_id, []).append(view.predictor.output_len(request))


def asking(predictor: str, *overrides: str) -> tuple[EngineHarness, Asking]:
    policy = Asking()
    descriptor = PolicyDescriptor(name="asking", api_version=(1, 7), factory=lambda options, context: policy)
    choices = ["scheduler=asking", f"scheduler.predictor={predictor}", *overrides]
    return EngineHarness(choices, catalogue=catalogue_with(descriptor)), policy


def said_of(policy: Asking, request_id: str) -> float:
    return policy.said[request_id][0]


def test_max_tokens_says_the_limit_of_the_request_or_of_the_model() -> None:
    harness, policy = asking("max_tokens", "model.max_model_len=100")
    harness.add([1, 2, 3], "own", max_tokens=7, true_output_tokens=2)
    harness.add([1, 2, 3], "models", max_tokens=None)
    assert (said_of(policy, "own"), said_of(policy, "models")) == (7, 97)


def test_the_oracle_says_what_the_workload_told() -> None:
    harness, policy = asking("oracle")
    harness.add([1, 2, 3], "told", max_tokens=50, true_output_tokens=5)
    harness.add([1, 2, 3], "too much", max_tokens=50, true_output_tokens=500)
    harness.add([1, 2, 3], "untold", max_tokens=50, ignore_eos=True)
    assert [said_of(policy, name) for name in ("told", "too much", "untold")] == [5, 50, 50]


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_a_prediction_never_falls_below_what_was_delivered(predictor: str) -> None:
    harness, policy = asking(predictor)
    harness.add([1, 2], "0", max_tokens=6, true_output_tokens=2, ignore_eos=True)
    harness.run()
    said = policy.said["0"]  # in line, and after each of five steps
    assert len(said) == 6
    assert all(delivered + 1 <= length <= 6 for delivered, length in enumerate(said))


@pytest.mark.parametrize("predictor", ["oracle", "noisy"])
def test_an_oracle_warns_once_where_the_limit_need_not_be_the_truth(
    predictor: str, caplog: pytest.LogCaptureFixture
) -> None:
    harness, _ = asking(predictor)
    for name in "abc":
        harness.add([1, 2, 3], name, max_tokens=9)
    (warning,) = caplog.messages
    assert "request 'a'" in warning
    assert "true_output_tokens" in warning


@pytest.mark.parametrize(
    ("predictor", "facts"),
    [
        ("oracle", {"ignore_eos": True}),
        ("oracle", {"true_output_tokens": 4}),
        ("max_tokens", {}),
        ("prompt", {}),
    ],
)
def test_nobody_is_warned_where_there_is_nothing_to_warn_of(
    predictor: str, facts: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    harness, _ = asking(predictor)
    harness.add([1, 2, 3], max_tokens=9, **facts)  # type: ignore[arg-type]
    assert not caplog.messages


@pytest.mark.parametrize("length", [0, -1, True, 2.0, "3"])
def test_a_true_length_that_is_no_number_of_tokens_is_refused_and_leaves_nothing(length: object) -> None:
    harness, policy = asking("oracle")
    with pytest.raises(ValidationError, match=r"true_output_tokens=.* must be a whole number of tokens, at least 1"):
        harness.add([1, 2, 3], "a", max_tokens=9, true_output_tokens=length)  # type: ignore[arg-type]
    assert not harness.has_requests
    harness.add([1, 2, 3], "a", max_tokens=9, true_output_tokens=4)
    assert policy.said == {"a": [4]}


def test_a_request_that_takes_an_id_again_is_not_told_what_was_told_of_the_other() -> None:
    harness, policy = asking("oracle")
    harness.add([1, 2, 3], "a", max_tokens=9, true_output_tokens=4, ignore_eos=True)
    harness.finish("a")
    harness.run()
    harness.add([1, 2, 3], "a", max_tokens=9, ignore_eos=True)
    assert policy.said["a"] == [4, 9]


# The noisy oracle


def noisy(sigma: float, seed: int = 0, truth: int = 100) -> OutputLengthPredictor:
    return predictor_noisy.NoisyPredictor(lambda request: truth, sigma=sigma, seed=seed)


class Some:
    """As much of a RequestView as predictors read."""

    def __init__(self, request_id: str, *, num_output_tokens: int = 0, num_prompt_tokens: int = 10) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.num_output_tokens = num_output_tokens
        self.max_output_tokens = 10**9


def some(request_id: str = "0", **facts: int) -> RequestView:
    return Some(request_id, **facts)  # type: ignore[return-value]


def test_the_error_of_the_noisy_oracle_is_lognormal_with_median_one() -> None:
    predictor = noisy(0.5)
    logs = [math.log(predictor.output_len(some(str(index))) / 100) for index in range(4000)]
    assert statistics.fmean(logs) == pytest.approx(0, abs=0.03)
    assert statistics.pstdev(logs) == pytest.approx(0.5, rel=0.05)


def test_the_error_of_a_request_is_the_same_in_every_run_of_a_seed() -> None:
    # The numbers themselves: another process, another day or another order of requests change nothing.
    said = [noisy(0.5, seed).output_len(some(name)) for seed in (0, 1) for name in ("0", "cmpl-1", "é\udcff")]
    assert said == pytest.approx([62.17701, 165.39708, 67.56969, 41.06377, 85.98004, 79.48793], rel=1e-6)


def test_the_noisy_oracle_without_noise_is_the_oracle() -> None:
    assert noisy(0.0).output_len(some()) == 100
    assert [noisy(0.0).quantile(some(), q) for q in (0, 0.5, 1)] == [100, 100, 100]


def test_the_quantiles_of_the_noisy_oracle_hold_as_often_as_they_say() -> None:
    predictor = noisy(0.7)
    for q in (0.1, 0.5, 0.9):
        share = statistics.fmean(predictor.quantile(some(str(index)), q) >= 100 for index in range(3000))
        assert share == pytest.approx(q, abs=0.03)


def test_the_extreme_quantiles_are_the_least_and_the_most_that_can_come() -> None:
    request = some(num_output_tokens=7)
    assert noisy(0.7).quantile(request, 0) == 8
    assert noisy(0.7).quantile(request, 1) == 10**9


@pytest.mark.parametrize("q", [-0.1, 1.1, math.nan])
def test_a_quantile_of_no_probability_is_refused(q: float) -> None:
    with pytest.raises(ValueError, match="from 0 to 1"):
        noisy(0.7).quantile(some(), q)


@settings(max_examples=50, deadline=None)
@given(st.floats(0, 10), st.integers(0, 2**63 - 1), st.integers(1, 10**9), st.text())
def test_no_error_is_so_large_that_a_prediction_is_no_number(sigma: float, seed: int, truth: int, name: str) -> None:
    predictor = noisy(sigma, seed, truth)
    for length in (predictor.output_len(some(name)), predictor.quantile(some(name), 0.999)):
        assert 1 <= length <= 10**9


# The prompt's length


def test_the_prompt_predictor_is_linear_in_the_prompt() -> None:
    harness, policy = asking("{name: prompt, ratio: 0.5, offset: 3}")
    harness.add(range(20), "20", max_tokens=100)
    harness.add(range(40), "40", max_tokens=100)
    harness.add(range(40), "short", max_tokens=9)
    assert [said_of(policy, name) for name in ("20", "40", "short")] == [13, 23, 9]


def test_a_prompt_predictor_that_learns_comes_closer_with_every_request_that_ends_by_itself() -> None:
    harness, policy = asking("{name: prompt, ratio: 1.0, learning_rate: 0.5}")
    for index in range(4):
        harness.add(range(8), str(index), max_tokens=100, ignore_eos=True)
        harness.step({str(index): [5] * 32})
        harness.finish(str(index))
        harness.run()
    assert [said_of(policy, str(index)) for index in range(4)] == [8, 8, 8, 8]  # aborted ones teach nothing
    for index in range(4, 8):
        harness.add(range(8), str(index), max_tokens=32, ignore_eos=True)
        harness.run()
    said = [said_of(policy, str(index)) for index in range(4, 8)]
    assert said == pytest.approx([8, 16, 8 * 4**0.75, 8 * 4**0.875])


# Options, and who is told


@pytest.mark.parametrize(
    ("choice", "words"),
    [
        ("{name: noisy, sigma: -1}", ("scheduler.predictor", "sigma=-1", "from 0 to 10")),
        ("{name: noisy, sigma: nan}", ("sigma=nan", "from 0 to 10")),
        ("{name: prompt, ratio: -0.5}", ("ratio=-0.5", "from 0 to")),
        ("{name: prompt, learning_rate: 2}", ("learning_rate=2", "from 0 to 1")),
        ("{name: prompt, sigma: 1}", ("unknown key 'scheduler.predictor.sigma'", "ratio")),
    ],
)
def test_a_bad_option_is_one_clear_line(choice: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config([f"scheduler.predictor={choice}"])
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [predictor_oracle, predictor_noisy])
def test_an_oracle_that_is_told_nothing_is_refused_at_its_start(make: object) -> None:
    descriptor = next(make.tokenyard_components())  # type: ignore[attr-defined]
    with pytest.raises(PluginError, match="was not given the true lengths"):
        descriptor.factory(descriptor.options_type(), PredictorContext(seed=0))
