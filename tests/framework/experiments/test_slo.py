"""SLOs: lengths of time with a unit, refused at launch when they are none."""

from __future__ import annotations

import pytest
from tokenyard.config import ExperimentConfig, SLOConfig
from tokenyard.durations import parse_seconds
from tokenyard.errors import ConfigError
from tokenyard.experiments.slo import SLO, parse_slo
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.experiment_checks import check_experiment


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("500ms", 0.5), ("2s", 2.0), ("0.25 s", 0.25), (".5s", 0.5), ("200us", 0.0002), (" 1e3ms ", 1.0)],
)
def test_a_length_of_time_is_a_number_and_its_unit(text: str, seconds: float) -> None:
    assert parse_seconds(text, "key") == pytest.approx(seconds, rel=1e-15)


def test_limits_are_those_that_are_set() -> None:
    slo = parse_slo(SLOConfig(ttft="500ms", e2e="30s"))
    assert slo == SLO(ttft=0.5, tpot=None, e2e=30.0)
    assert slo.limits == {"ttft": 0.5, "e2e": 30.0}
    assert SLO().limits == {}


@pytest.mark.parametrize("name", ["ttft", "tpot", "e2e"])
@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (500.0, "=500 has no unit; write it like 500ms or 0.5s"),
        (0.5, "=0.5 has no unit"),
        ("500", "=500 has no unit"),
        ("5min", "has an unknown unit 'min'; known: us, ms, s"),
        ("5MS", "has an unknown unit 'MS'"),
        ("-5ms", "must be above 0"),
        ("0s", "must be above 0"),
        ("nans", "must be above 0"),
        ("infs", "must be above 0 and at most"),
        ("1e400s", "must be above 0 and at most"),
        (float("nan"), "has no unit"),
        ("fast", "is not a length of time; write a number and its unit"),
        ("", "is not a length of time"),
    ],
)
def test_what_is_no_length_of_time_is_one_clear_error(name: str, value: str | float, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_experiment(ExperimentConfig(slo=SLOConfig(**{name: value})))
    assert str(error.value).startswith(f"experiment.slo.{name}=")
    assert reason in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("500", "=500 has no unit"),
        ("-5ms", "must be above 0"),
        ("true", "must be text or a number"),
        ("5m", "known: us"),
    ],
)
def test_a_launch_refuses_it(value: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"experiment\.slo\.ttft.*{reason}"):
        load_engine_config([f"experiment.slo.ttft={value}"])


@pytest.mark.parametrize("weight", [0.0, -1.0, float("nan"), float("inf")])
def test_a_weight_is_above_0(weight: float) -> None:
    with pytest.raises(ConfigError, match=r"experiment\.client_weights\.b must be .* above 0, got"):
        check_experiment(ExperimentConfig(client_weights={"a": 1.0, "b": weight}))


def test_weights_of_clients_are_numbers_by_name() -> None:
    config, _ = load_engine_config(["experiment.client_weights={a: 3, b: 0.5}"])
    assert config.experiment.client_weights == {"a": 3.0, "b": 0.5}


def test_a_config_keeps_what_was_written() -> None:
    config, _ = load_engine_config(["experiment.slo.ttft=500ms", "experiment.slo.tpot=50ms"])
    assert parse_slo(config.experiment.slo) == SLO(ttft=0.5, tpot=0.05)
