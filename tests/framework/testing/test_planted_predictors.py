"""The suites for predictors and latency models find one planted fault each."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Sequence
from typing import Any

import pytest
from tokenyard.descriptors import ComponentDescriptor, Descriptor
from tokenyard.errors import ConfigError
from tokenyard.interfaces import (
    LatencyModel,
    OutputLengthPredictor,
    PredictorContext,
    RequestView,
    StepLoad,
    possible_output_len,
)
from tokenyard.testing import ContractViolation, LatencyModelContract, PredictorContract

# Predictors


class Right(OutputLengthPredictor):
    def __init__(self, context: PredictorContext) -> None:
        self.seed = context.seed
        self.calls = 0

    def output_len(self, request: RequestView) -> float:
        return possible_output_len(request, 10)


class Constant(Right):
    def output_len(self, request: RequestView) -> float:
        return 10


class AboveTheLimit(Right):
    def output_len(self, request: RequestView) -> float:
        return max(10, request.num_output_tokens + 1)


class NotANumber(Right):
    def output_len(self, request: RequestView) -> float:
        return math.nan


class Text(Right):
    def output_len(self, request: RequestView) -> float:
        return "10"  # type: ignore[return-value]


class Raising(Right):
    def on_finish(self, request: RequestView) -> None:
        raise RuntimeError("planted")


class ShrinkingQuantiles(Right):
    def quantile(self, request: RequestView, q: float) -> float:
        return possible_output_len(request, 10 - 9 * q)


class QuantileBelow(Right):
    def quantile(self, request: RequestView, q: float) -> float:
        return q * self.output_len(request)


class CountsCalls(Right):
    def output_len(self, request: RequestView) -> float:
        self.calls += 1
        return possible_output_len(request, self.calls)


class EverySecond(Right):
    """Its kind counts its objects, as global state does: every second one turns the order round."""

    count = 0

    def __init__(self, context: PredictorContext) -> None:
        super().__init__(context)
        EverySecond.count += 1
        self.sign = 1 if EverySecond.count % 2 else -1

    def output_len(self, request: RequestView) -> float:
        return possible_output_len(request, 12 + self.sign * request.num_prompt_tokens)


class ReadsTheClock(Right):
    def output_len(self, request: RequestView) -> float:
        time.monotonic()
        return super().output_len(request)


class Draws(Right):
    def output_len(self, request: RequestView) -> float:
        random.random()
        return super().output_len(request)


@pytest.mark.parametrize(
    ("make", "test", "rule"),
    [
        (Constant, "test_a_prediction_is_possible", "predictor.possible"),
        (AboveTheLimit, "test_a_prediction_is_possible", "predictor.possible"),
        (NotANumber, "test_a_prediction_is_possible", "predictor.possible"),
        (Text, "test_a_prediction_is_possible", "predictor.possible"),
        (QuantileBelow, "test_a_prediction_is_possible", "predictor.possible"),
        (Raising, "test_a_prediction_depends_on_nothing_but_requests_and_seed", "predictor.never_raises"),
        (ShrinkingQuantiles, "test_quantiles_grow", "predictor.quantiles"),
        (CountsCalls, "test_a_prediction_depends_on_nothing_but_requests_and_seed", "predictor.pure"),
        (EverySecond, "test_a_prediction_depends_on_nothing_but_requests_and_seed", "predictor.pure"),
        (ReadsTheClock, "test_it_reads_no_clock_and_draws_no_numbers", "predictor.no_clock"),
        (EverySecond, "test_it_serves_a_policy_in_an_engine", "predictor.in_engine"),
        (Draws, "test_it_reads_no_clock_and_draws_no_numbers", "predictor.no_draws"),
    ],
)
def test_a_broken_predictor_is_found(make: type[Right], test: str, rule: str) -> None:
    class Suite(PredictorContract):
        simplifies = False

        def descriptors(self) -> Sequence[Descriptor[Any]]:
            return [predictor(make)]

    with pytest.raises(ContractViolation) as caught:
        getattr(Suite(), test)()
    assert caught.value.rule == rule


def predictor(make: type[Right]) -> ComponentDescriptor[Any]:
    return ComponentDescriptor(
        component_kind="predictor", name="planted", api_version=(1, 7), factory=lambda options, context: make(context)
    )


class TestRightPredictor(PredictorContract):
    """A suite without overrides tests the one descriptor that it has."""

    def descriptors(self) -> Sequence[Descriptor[Any]]:
        return [predictor(Right)]


def test_a_suite_that_names_no_predictor_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"which predictor it tests: set overrides = \['scheduler.predictor=NAME'\]"):
        PredictorContract().test_a_prediction_is_possible()


# Latency models


class Steady(LatencyModel):
    def __init__(self) -> None:
        self.calls = 0

    def step_seconds(self, load: StepLoad) -> float:
        return 0.01


class Nothing(Steady):
    def step_seconds(self, load: StepLoad) -> float:
        return 0.001 * load.num_decodes


class Endless(Steady):
    def step_seconds(self, load: StepLoad) -> float:
        return math.inf if load.num_prefill_tokens else 1.0


class DividesByZero(Steady):
    def step_seconds(self, load: StepLoad) -> float:
        return 1 / load.num_prefills


class Shrinks(Steady):
    def step_seconds(self, load: StepLoad) -> float:
        return 1 / (1 + load.num_prefill_tokens)


class FirstChunkIsFree(Steady):
    def step_seconds(self, load: StepLoad) -> float:
        return 2.0 if not load.num_prefills else 1.0


class GetsTired(Steady):
    def step_seconds(self, load: StepLoad) -> float:
        self.calls += 1
        return float(self.calls)


class EverySecondModel(Steady):
    """Its kind counts its objects, as global state does: for every second one tokens cost nothing."""

    count = 0

    def __init__(self) -> None:
        super().__init__()
        EverySecondModel.count += 1
        self.per_token = EverySecondModel.count % 2

    def step_seconds(self, load: StepLoad) -> float:
        return 1.0 + self.per_token * load.num_prefill_tokens


class Measures(Steady):
    def step_seconds(self, load: StepLoad) -> float:
        time.perf_counter_ns()
        return 1.0


class Talks(Steady):
    @property
    def calibration(self) -> str:
        return "an A100\nwithin 5 %"


class FullStepsAreFree(Steady):
    def step_seconds(self, load: StepLoad) -> float:
        return 1.0 if load.num_tokens < 2048 else 0.0


class Dices(Steady):
    def step_seconds(self, load: StepLoad) -> float:
        return 1.0 + 0 * random.random()


@pytest.mark.parametrize(
    ("make", "test", "rule"),
    [
        (Nothing, "test_a_step_takes_time", "latency.seconds"),
        (Endless, "test_a_step_takes_time", "latency.seconds"),
        (FullStepsAreFree, "test_a_step_takes_time", "latency.seconds"),
        (Talks, "test_it_says_in_a_line_what_it_was_calibrated_on", "latency.calibration"),
        (DividesByZero, "test_a_step_takes_time", "latency.never_raises"),
        (Shrinks, "test_more_prefill_tokens_never_take_less", "latency.grows"),
        (FirstChunkIsFree, "test_more_prefill_tokens_never_take_less", "latency.grows"),
        (GetsTired, "test_it_depends_on_nothing_but_the_load", "latency.pure"),
        (EverySecondModel, "test_it_serves_a_policy_in_an_engine", "latency.in_engine"),
        (Measures, "test_it_reads_no_clock_and_draws_no_numbers", "latency.no_clock"),
        (Dices, "test_it_reads_no_clock_and_draws_no_numbers", "latency.no_draws"),
    ],
)
def test_a_broken_latency_model_is_found(make: type[Steady], test: str, rule: str) -> None:
    class Suite(LatencyModelContract):
        simplifies = False

        def descriptors(self) -> Sequence[Descriptor[Any]]:
            return [latency_model(make)]

    with pytest.raises(ContractViolation) as caught:
        getattr(Suite(), test)()
    assert caught.value.rule == rule


def latency_model(make: type[Steady]) -> ComponentDescriptor[Any]:
    return ComponentDescriptor(
        component_kind="latency", name="planted", api_version=(1, 7), factory=lambda options, context: make()
    )


class TestRightLatencyModel(LatencyModelContract):
    def descriptors(self) -> Sequence[Descriptor[Any]]:
        return [latency_model(Steady)]


def test_no_latency_model_is_none_to_test() -> None:
    class Suite(LatencyModelContract):
        overrides = ("latency=none",)

    with pytest.raises(ConfigError, match="latency=none is no latency model"):
        Suite().test_a_step_takes_time()
