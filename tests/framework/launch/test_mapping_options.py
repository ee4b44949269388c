"""Options that are mappings: what they hold is for the user to name."""

from __future__ import annotations

import pytest
from tokenyard.errors import ConfigError
from tokenyard.launch.compose import load_engine_config


@pytest.mark.parametrize(
    "overrides",
    [
        ["scheduler.policy.weights={alice: 2, bob: 0.5}"],
        ["scheduler.policy.weights.alice=2", "scheduler.policy.weights.bob=0.5"],
        ["+scheduler.policy.weights={alice: 2, bob: 0.5}"],
    ],
    ids=["whole", "by key", "with +"],
)
def test_a_mapping_is_given_whole_or_key_by_key(overrides: list[str]) -> None:
    config, _ = load_engine_config(["scheduler=weighted-vtc", *overrides])
    assert config.scheduler.policy is not None
    assert getattr(config.scheduler.policy.options, "weights", None) == {"alice": 2.0, "bob": 0.5}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("scheduler.policy.weights={alice: much}", r"scheduler\.policy\.weights\.alice must be a number, got 'much'"),
        ("scheduler.policy.weights=[1, 2]", r"scheduler\.policy\.weights must be a mapping, .* got \[1,2\]$"),
        ("scheduler.policy.weights=2", r"scheduler\.policy\.weights must be a mapping from text to a number, got 2"),
        ("scheduler.policy.wieghts={alice: 2}", r"did you mean 'scheduler\.policy\.weights'"),
    ],
    ids=["wrong value", "list", "no mapping", "misspelt"],
)
def test_what_is_wrong_is_told_with_its_key(override: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_engine_config(["scheduler=weighted-vtc", override])


def test_a_mapping_of_another_policy_is_an_unknown_key() -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'scheduler\.policy\.weights'"):
        load_engine_config(["scheduler=fcfs", "scheduler.policy.weights={alice: 2}"])


@pytest.mark.parametrize(
    "overrides",
    [
        ["workload.prompt={kind: constant, value: 7}"],
        ["workload.prompt.kind=constant", "workload.prompt.value=7"],
    ],
    ids=["whole", "by key"],
)
def test_an_option_whose_default_is_a_number_may_be_given_as_a_mapping(overrides: list[str]) -> None:
    config, _ = load_engine_config(["workload=synthetic", *overrides])
    prompt = getattr(config.workload.options, "prompt", None)
    assert (getattr(prompt, "kind", None), getattr(prompt, "value", None)) == ("constant", 7)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("workload.prompt.valeu=7", r"unknown key 'workload\.prompt\.valeu'; did you mean 'workload\.prompt\.value'"),
        ("workload.prompt={kind: constant}", r"workload\.prompt: kind=constant needs value"),
        ("workload.prompt={kind: constant, value: many}", r"workload\.prompt\.value must be a whole number"),
        ("workload.prompt=many", r"workload\.prompt must be a whole number or a mapping with the keys kind"),
        ("workload.rate={kind: constant}", r"workload\.rate must be a number"),
    ],
    ids=["misspelt", "refused by its own checks", "wrong value", "neither", "no mapping"],
)
def test_what_is_wrong_in_a_mapping_is_told_with_its_key(override: str, message: str) -> None:
    given = [override] if override.count("valeu") == 0 else ["workload.prompt.kind=constant", override]
    with pytest.raises(ConfigError, match=message):
        load_engine_config(["workload=synthetic", *given])
