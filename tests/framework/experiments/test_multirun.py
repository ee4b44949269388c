"""Several runs, each in a process of its own: ends of every kind, what is made again, and what is left behind."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from experiment_children import FAILS, HANGS, KILLED
from tokenyard.config import EngineConfig
from tokenyard.errors import UserError
from tokenyard.experiments import multirun
from tokenyard.experiments.experiment_folder import ExperimentFolder
from tokenyard.experiments.facts import config_hash
from tokenyard.experiments.multirun import Outcome, num_cores, num_jobs, run_all
from tokenyard.experiments.plan import Plan, PlannedRun
from tokenyard.experiments.run_folder import read_result


@pytest.fixture(autouse=True)
def scripted_children(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(multirun, "MODULE", "experiment_children")


def plan_of(*seeds: int, jobs: int | None = 2, is_simulated: bool = True, is_multirun: bool = True) -> Plan:
    runs = []
    for number, seed in enumerate(seeds):
        base = EngineConfig(seed=seed)
        config = EngineConfig(seed=seed, experiment=type(base.experiment)(jobs=jobs))
        runs.append(
            PlannedRun(
                number=number,
                overrides=(f"seed={seed}",),
                varying=(f"seed={seed}",),
                config=config,
                config_hash=config_hash(config),
                is_simulated=is_simulated,
            )
        )
    return Plan(runs=tuple(runs), is_multirun=is_multirun)


def made(path: Path, plan: Plan, tell: Callable[[Outcome], None] = lambda outcome: None) -> list[Outcome]:
    folder = ExperimentFolder(path, plan)
    with folder.opened():
        return run_all(plan, folder, tell)


def children() -> set[str]:
    """Processes of this one."""
    return {pid for path in Path(f"/proc/{os.getpid()}/task").glob("*/children") for pid in path.read_text().split()}


def statuses(outcomes: Sequence[Outcome]) -> list[str]:
    return [outcome.status for outcome in outcomes]


def test_a_run_that_fails_or_is_killed_takes_no_other_along(tmp_path: Path) -> None:
    told: list[Outcome] = []
    outcomes = made(tmp_path / "e", plan_of(1, KILLED, FAILS, 2), told.append)
    assert statuses(outcomes) == ["finished", "failed", "failed", "finished"]
    assert outcomes[1].error == "its process was killed by SIGKILL"
    assert outcomes[2].error == "the server is gone"
    assert sorted(told, key=lambda one: one.run.number) == outcomes
    assert not (tmp_path / "e" / "2" / "result.json").exists()


def test_what_is_done_is_not_made_again_and_what_is_not_is(tmp_path: Path) -> None:
    plan = plan_of(1, FAILS, 2)
    made(tmp_path, plan)
    first = {number: read_result(tmp_path / str(number))["metrics"] for number in (0, 2)}
    (tmp_path / "2" / "result.json").unlink()
    outcomes = made(tmp_path, plan)
    assert statuses(outcomes) == ["skipped", "failed", "finished"]
    assert read_result(tmp_path / "0")["metrics"] == first[0]
    assert read_result(tmp_path / "2")["metrics"] != first[2]  # another process made it


def test_a_result_of_another_config_is_made_again(tmp_path: Path) -> None:
    plan = plan_of(1)
    made(tmp_path, plan)
    path = tmp_path / "0" / "result.json"
    result = json.loads(path.read_text())
    path.write_text(json.dumps({**result, "facts": {"config_hash": "that of an older version"}}))
    assert ExperimentFolder(tmp_path, plan).is_stale(plan.runs[0])
    assert statuses(made(tmp_path, plan)) == ["finished"]
    assert not ExperimentFolder(tmp_path, plan).is_stale(plan.runs[0])


def test_a_folder_of_another_experiment_is_refused_and_left_as_it_was(tmp_path: Path) -> None:
    made(tmp_path, plan_of(1, 2))
    before = (tmp_path / "experiment.json").read_bytes()
    for plan in (plan_of(1, 3), plan_of(1), plan_of(1, 2, 3)):
        with pytest.raises(UserError, match="holds another experiment"):
            made(tmp_path, plan)
    assert (tmp_path / "experiment.json").read_bytes() == before


def test_a_folder_with_other_things_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("")
    with pytest.raises(UserError, match="is not empty, and holds no experiment"):
        made(tmp_path, plan_of(1))
    with pytest.raises(UserError, match="no experiment can be kept there"):
        made(tmp_path / "thesis.tex" / "x", plan_of(1))
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "experiment.json").write_text("[]")
    with pytest.raises(UserError, match="is no plan of an experiment"):
        made(tmp_path / "d", plan_of(1))


def test_two_processes_do_not_work_in_one_folder(tmp_path: Path) -> None:
    plan = plan_of(1)
    with (
        ExperimentFolder(tmp_path, plan).opened(),
        pytest.raises(UserError, match="another process works in it"),
        ExperimentFolder(tmp_path, plan).opened(),
    ):
        pass


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interruption_ends_the_children_and_leaves_whole_results_only(
    tmp_path: Path, error: type[BaseException]
) -> None:
    def interrupt(outcome: Outcome) -> None:
        raise error

    before = children()
    with pytest.raises(error):
        made(tmp_path, plan_of(HANGS, 1, 2), interrupt)
    assert (tmp_path / "1" / "result.json").exists()  # the one that was done
    assert not (tmp_path / "0" / "requests.csv").exists()
    assert children() <= before


def test_a_single_run_lies_in_the_folder_itself(tmp_path: Path) -> None:
    (outcome,) = made(tmp_path / "e", plan_of(1, is_multirun=False))
    assert outcome.folder == tmp_path / "e"
    assert (tmp_path / "e" / "result.json").exists()
    assert (tmp_path / "e" / ".hydra" / "overrides.yaml").read_text() == '- "seed=1"\n'


def test_as_many_run_at_a_time_as_there_are_cores_and_live_ones_alone() -> None:
    assert num_jobs(plan_of(1, jobs=None)) == num_cores()
    assert num_jobs(plan_of(1, jobs=None, is_simulated=False)) == 1
    assert num_jobs(plan_of(1, jobs=5, is_simulated=False)) == 5
