"""`tokenyard experiment` from the command line to the files."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenyard.cli import experiment, run
from tokenyard.experiments.facts import config_hash
from tokenyard.experiments.launched import FolderTask
from tokenyard.experiments.run_folder import read_run
from tokenyard.experiments.run_job import run_and_tell
from tokenyard.experiments.simulation import run_simulated
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.hydra_jobs import run_by_launcher

BASE = ("workload=synthetic", "workload.limit=6", "latency=constant", "latency.per_step=0.01")


def test_runs_and_their_metrics_are_told_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "e"
    command = ["experiment", "-m", *BASE, "scheduler=fcfs,sjf", "--out", str(place), "--json"]
    assert run(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["dir"], told["failed"]) == (str(place), 0)
    assert [one["status"] for one in told["runs"]] == ["finished", "finished"]
    assert all(one["metrics"]["ttft"]["mean"] > 0 for one in told["runs"])
    stored = read_run(place / "1")
    assert stored.overrides == ["executor=simulated", *BASE, "scheduler=sjf"]
    config, catalogue = load_engine_config(stored.overrides)
    assert stored.facts["config_hash"] == config_hash(config) == told["runs"][1]["config_hash"]
    assert stored.record.requests.finish.tolist() == run_simulated(config, catalogue).requests.finish.tolist()
    assert stored.record.steps is not None

    assert run(command[:-1]) == 0  # once more
    shown = capsys.readouterr()
    assert shown.err.count("was done before") == 2
    assert "scheduler=sjf" in shown.out


def test_a_failed_run_is_told_and_the_exit_code_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [*BASE, "model.max_model_len=20,100000", "--out", str(tmp_path / "e")]
    assert run(["experiment", "-m", *given]) == 1
    shown = capsys.readouterr()
    assert "model.max_model_len=20: failed: request" in shown.err
    assert "1 of 2 runs failed" in shown.err
    assert "model.max_model_len=100000" in shown.out
    assert "request" in (tmp_path / "e" / "0" / "error.txt").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["workload=synthetic", "seed=1,2"], "give -m"),
        (["workload=synthetic", "hydra/launcher=basic"], "one run needs no launcher"),
        (["-m", "workload=synthetic", "hydra/launcher=nosuch"], "Hydra cannot launch with this"),
        (["word"], "unexpected argument 'word'"),
        ([], "there is nothing to run"),
        (["-m", "workload=synthetic", "--out", ""], "experiment.dir must be"),
    ],
)
def test_bad_usage_is_one_line(arguments: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["experiment", *arguments]) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("error: ")
    assert told in last


def test_a_launcher_that_is_not_installed_is_refused_with_its_extra(capsys: pytest.CaptureFixture[str]) -> None:
    try:
        import hydra_plugins.hydra_joblib_launcher  # noqa: F401
    except ImportError:
        assert run(["experiment", "-m", *BASE, "hydra/launcher=joblib"]) == 2
        assert "pip install 'tokenyard[joblib]'" in capsys.readouterr().err
    else:
        pytest.skip("it is installed")


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["basic", "joblib", "submitit_local"])
def test_one_of_hydras_launchers_makes_the_runs(
    launcher: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if launcher != "basic":
        pytest.importorskip(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
    given = ["experiment", "-m", *BASE, "seed=1,2", f"hydra/launcher={launcher}", "--out", str(tmp_path / "e")]
    assert run(given) == 0
    assert {read_run(tmp_path / "e" / number).facts["seed"] for number in ("0", "1")} == {1, 2}
    assert run(given) == 0  # nothing is left to launch
    assert capsys.readouterr().err.count("was done before") == 2


def test_a_launchers_job_that_dies_is_told_in_its_folder(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    run_by_launcher(["hydra/launcher=basic"], tmp_path, 1, FolderTask([str(tmp_path / "0")]))
    assert "config.yaml: cannot be read" in (tmp_path / "0" / "error.txt").read_text()


def test_a_bug_is_told_with_where_it_came_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(folder: Path) -> None:
        raise LookupError("no such\nthing")

    monkeypatch.setattr("tokenyard.experiments.run_job.run_in", broken)
    assert run_and_tell(tmp_path) == 1
    first, _, rest = (tmp_path / "error.txt").read_text().partition("\n")
    assert first == "LookupError: no such thing"
    assert "in broken" in rest


@pytest.mark.slow
def test_each_run_has_a_trace_of_its_own(tmp_path: Path) -> None:
    place = tmp_path / "e"
    assert run(["experiment", "-m", *BASE, "seed=1,2", "trace.path=t.jsonl", "--out", str(place)]) == 0
    assert (place / "0" / "t.jsonl").is_file()
    assert (place / "1" / "t.jsonl").is_file()
    assert run(["replay", str(place / "1" / "t.jsonl")]) == 0
    (place / "1" / "result.json").unlink()
    assert run(["experiment", "-m", *BASE, "seed=1,2", "trace.path=t.jsonl", "--out", str(place)]) == 0


def test_a_live_target_needs_no_latency_model() -> None:
    given = experiment.parse(
        experiment.command_parser(), ["workload=synthetic", "experiment.target=http://127.0.0.1:1"]
    )
    assert experiment._plan(given).config.latency.name == "none"


def test_who_names_no_latency_model_is_told_which_one_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    given = experiment.parse(experiment.command_parser(), ["workload=synthetic"])
    assert experiment._plan(given).config.latency.name == "linear"
    assert "note: no latency model is named" in capsys.readouterr().err
