"""The latency models that ship: their seconds, their options, and what a policy makes of them."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from tokenyard import PolicyDescriptor
from tokenyard.errors import ConfigError
from tokenyard.interfaces import (
    LatencyModelContext,
    PolicyContext,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    StepLoad,
    StepOutcome,
)
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.steering import make_steering
from tokenyard.testing import EngineHarness, LatencyModelContract, catalogue_with

LINEAR = ("latency=linear", "latency.per_step=0.01", "latency.per_token=0.001", "latency.per_context_token=0.00001")


class TestConstant(LatencyModelContract):
    overrides = ("latency=constant", "latency.per_step=0.01")


class TestLinear(LatencyModelContract):
    overrides = LINEAR


class TestLinearWithoutContext(LatencyModelContract):
    overrides = ("latency=linear", "latency.per_step=0.01", "latency.per_token=0")


def seconds(load: StepLoad, *overrides: str) -> float:
    model = make_steering(*load_engine_config(overrides)).latency
    assert model is not None
    return model.step_seconds(load)


def test_a_constant_step_is_as_long_whatever_it_computes() -> None:
    for load in (StepLoad(num_decodes=1), StepLoad(num_prefills=3, num_prefill_tokens=4000)):
        assert seconds(load, "latency=constant", "latency.per_step=0.25") == 0.25


def test_a_linear_step_adds_its_tokens_and_the_context_of_its_decodes() -> None:
    load = StepLoad(
        num_decodes=3,
        num_decode_context_tokens=500,
        num_prefills=2,
        num_prefill_tokens=40,
        num_prefill_context_tokens=9000,
    )
    assert seconds(load, *LINEAR) == pytest.approx(0.01 + 43 * 0.001 + 500 * 0.00001)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["latency=constant"], ("latency.per_step has no value", "a number", "latency.per_step=...")),
        (["latency=linear", "latency.per_step=1"], ("latency.per_token has no value",)),
        (["latency=constant", "latency.per_step=0"], ("latency.per_step=0", "above 0")),
        (["latency=constant", "latency.per_step=inf"], ("latency.per_step=inf", "above 0")),
        (["latency=linear", "latency.per_step=nan", "latency.per_token=0"], ("latency.per_step=nan", "above 0")),
        (["latency=linear", "latency.per_step=1", "latency.per_token=-1"], ("latency.per_token=-1", "at least 0")),
        (["latency=constant", "latency.per_step=fast"], ("latency.per_step must be a number, got 'fast'",)),
        (["latency=constant", "latency.per_token=1"], ("unknown key 'latency.per_token'", "per_step")),
        (["latency.per_step=1"], ("unknown key 'latency.per_step'",)),
    ],
)
def test_a_bad_option_is_one_clear_line(overrides: list[str], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_engine_config(overrides)
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "\n" not in str(caught.value)
    assert "(from default)" not in str(caught.value)


@pytest.mark.parametrize("option", ["latency.per_token=1e308", "latency.per_context_token=1e308"])
def test_times_whose_largest_step_has_no_finite_time_are_refused(option: str) -> None:
    others = ["latency.per_token=0"] if "context" in option else []
    with pytest.raises(ConfigError, match=rf"{option.partition('=')[0]}=1e\+308 .* too large: a step of \d+ tokens"):
        EngineHarness(["latency=linear", "latency.per_step=1e308", *others, option])


def test_the_context_of_a_latency_model_has_the_budget_of_a_step() -> None:
    assert LatencyModelContext(max_num_batched_tokens=7).max_num_batched_tokens == 7


class Timing(SchedulingPolicy):
    """Gives each step as many tokens as fit `target` seconds, and notes what it was told."""

    def __init__(self, context: PolicyContext, target: float = 0.05) -> None:
        self.has_latency = context.has_latency
        self.target = target
        self.noted: list[int] = []  # after each step

    def token_budget(self, view: SchedulerView) -> int | None:
        return view.latency.budget_for(self.target)

    def on_step(self, outcomes: Sequence[StepOutcome], view: SchedulerView) -> None:
        self.noted.append(view.latency.budget_for(self.target))
        assert view.latency.budget_for(self.target) == self.noted[-1]


class Ignorant(SchedulingPolicy):
    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return view.latency.predict(StepLoad(num_decodes=1))


def harness_with(policy: type[SchedulingPolicy], *overrides: str) -> EngineHarness:
    descriptor = PolicyDescriptor(
        name="timed",
        api_version=(1, 7),
        factory=lambda options, context: policy(context) if policy is Timing else policy(),
    )
    return EngineHarness(["scheduler=timed", *overrides], catalogue=catalogue_with(descriptor))


def test_a_policy_inverts_the_model_for_a_target_step_time() -> None:
    harness = harness_with(Timing, *LINEAR)
    policy = harness.policy
    assert isinstance(policy, Timing)
    assert policy.has_latency
    harness.add(range(100), "long", max_tokens=3)
    harness.add(range(10), "short", max_tokens=3)
    harness.step()
    assert harness.scheduled == {"long": 40}  # 10 ms + 40 tokens of 1 ms each
    harness.step()
    harness.step()
    assert harness.scheduled == {"long": 20, "short": 10}
    # Then two decodes read 100 and 10 tokens: they leave 38.9 ms.
    assert policy.noted == [40, 40, 38]


def test_decodes_are_never_held_back_however_short_the_time() -> None:
    harness = harness_with(Timing, "latency=constant", "latency.per_step=1")
    policy = harness.policy
    assert isinstance(policy, Timing)
    harness.add(range(4), "0", max_tokens=5)
    harness.add(range(4), "1", max_tokens=5)
    policy.target = 2.0
    harness.step()
    policy.target = 0.5
    harness.step()
    assert policy.noted == [2048, 2]
    assert harness.scheduled == {"0": 1, "1": 1}


def test_a_policy_that_asks_without_a_model_is_told_what_to_set() -> None:
    harness = harness_with(Ignorant)
    with pytest.raises(Exception, match="no latency model is configured; set latency=linear"):
        harness.add([1, 2, 3])


def test_a_policy_is_told_whether_there_is_a_model() -> None:
    policy = harness_with(Timing).policy
    assert isinstance(policy, Timing)
    assert not policy.has_latency
