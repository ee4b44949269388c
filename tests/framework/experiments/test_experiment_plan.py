"""What an experiment is going to run: each combination once, checked before the first one begins."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenyard.errors import ConfigError, UserError
from tokenyard.experiments.plan import plan_experiment
from tokenyard.launch.flags import Flagged
from tokenyard.launch.hydra_jobs import split_hydra_overrides
from tokenyard.launch.sweep import MOST_RUNS, expand_sweeps, names_several

BASE = ("executor=simulated", "latency=constant", "latency.per_step=0.01", "workload=synthetic")


def expanded(*overrides: str | Flagged) -> list[list[str | Flagged]]:
    return [all_of_it for all_of_it, _ in expand_sweeps(overrides)]


def test_every_combination_is_a_run_and_the_last_override_changes_fastest() -> None:
    assert expanded("a=1,2", "seed=3", "b=x,y") == [
        ["a=1", "seed=3", "b=x"],
        ["a=1", "seed=3", "b=y"],
        ["a=2", "seed=3", "b=x"],
        ["a=2", "seed=3", "b=y"],
    ]
    assert [varying for _, varying in expand_sweeps(["a=1,2", "seed=3"])] == [["a=1"], ["a=2"]]


@pytest.mark.parametrize(
    ("override", "values"),
    [
        ("seed=range(1,4)", ["seed=1", "seed=2", "seed=3"]),
        ("seed=choice(1,2)", ["seed=1", "seed=2"]),
        ("a=[1,2],[3]", ["a=[1,2]", "a=[3]"]),
        ("++a={b:1,c:2},{b:2}", ["++a={b:1,c:2}", "++a={b:2}"]),
        ("a='x,y',z", ["a='x,y'", "a=z"]),
    ],
)
def test_hydras_ways_to_name_several_values_work(override: str, values: list[str]) -> None:
    assert [texts for (texts,) in expanded(override)] == values


@pytest.mark.parametrize("override", ["a=[1,2]", "a={b:1,c:2}", "a='1,2'", "a=f(1)", "no override, at all"])
def test_what_names_one_value_is_left_alone(override: str) -> None:
    assert not names_several(override)
    assert expanded(override) == [[override]]


def test_what_a_flag_stands_for_is_one_value() -> None:
    flag = Flagged("model.name=a,b", "--model")
    assert expanded(flag) == [[flag]]


def test_glob_names_the_parts_that_match() -> None:
    found = [text for (text, *_) in expanded("scheduler=glob(*vtc)", *BASE)]
    assert found == ["scheduler=vtc", "scheduler=weighted-vtc"]


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("a=interval(0,1)", "an interval has no end of values"),
        ("a=shuffle(1,2,3)", "a shuffled order could not be made again"),
        ("a=range(1,1)", "names no value"),
        (f"a=range(0,{MOST_RUNS + 1})", f"more than {MOST_RUNS}"),
        ("a=range(0,100000000000)", f"more than {MOST_RUNS}"),
    ],
)
def test_what_cannot_be_run_is_refused(override: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        expand_sweeps([override])


def test_a_plan_has_a_config_for_each_run() -> None:
    plan = plan_experiment([*BASE, "scheduler=fcfs,sjf", "experiment.jobs=3"], is_multirun=True)
    policies = [run.config.scheduler.policy for run in plan.runs]
    assert [policy.name for policy in policies if policy is not None] == ["fcfs", "sjf"]
    assert [run.varying for run in plan.runs] == [("scheduler=fcfs",), ("scheduler=sjf",)]
    assert all(run.is_simulated for run in plan.runs)
    assert plan.runs[0].overrides == (*BASE, "scheduler=fcfs")  # where and how fast is no part of what is run


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["seed=1,1"], "runs 0 and 1 have the same config"),
        (["workload=none"], "there is nothing to run"),
        (["scheduler=fcfs,sjff"], "did you mean 'sjf'"),
        (["experiment.jobs=0"], "experiment.jobs must be at least 1"),
        (["experiment.dir=''"], "experiment.dir must be"),
        (["seed=1,2", "trace.path=/tmp/a.jsonl"], "several runs cannot write one file"),
    ],
)
def test_a_run_that_cannot_be_made_is_told_before_any_begins(overrides: list[str], told: str) -> None:
    with pytest.raises(UserError, match=told):
        plan_experiment([*BASE, *overrides], is_multirun=True)


def test_several_values_without_m_are_refused_with_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"seed=1,2: names several values.*give -m"):
        plan_experiment([*BASE, "seed=1,2"], is_multirun=False)


def test_a_config_file_may_name_several_values(tmp_path: Path) -> None:
    (tmp_path / "my.yaml").write_text("- seed=1,2\n- scheduler=sjf\n")
    plan = plan_experiment(BASE, config_file=tmp_path / "my.yaml", is_multirun=True)
    assert [run.config.seed for run in plan.runs] == [1, 2]


def test_hydras_own_overrides_are_for_its_launchers_alone() -> None:
    words = ["-m", "hydra/launcher=joblib", "seed=1,2", "hydra.launcher.n_jobs=2"]
    assert split_hydra_overrides(words) == (["hydra/launcher=joblib", "hydra.launcher.n_jobs=2"], ["-m", "seed=1,2"])
    for word, told in (
        ("hydra/sweeper=optuna", "alone hold here"),
        ("hydra.sweep.dir=x", "--out DIR"),
        ("hydra.launcher.n_jobs=2", "name the launcher too"),
    ):
        with pytest.raises(ConfigError, match=told):
            split_hydra_overrides([word])
