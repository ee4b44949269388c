"""Sinks, with fakes in place of the projects that they hand results to."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tokenyard.errors import ConfigError, TokenyardError
from tokenyard.experiments.sinks import check_sinks, send

FACTS = {"seed": 3, "workload": {"name": "trace"}, "components": [{"kind": "policy"}], "long": "x" * 9000}
METRICS = {
    "ttft": {"mean": 0.5, "p99": None},
    "by_client": {"a b<": {"requests": 2}},
    "is_exact": True,
    "rate": float("nan"),
}
NUMBERS = {"ttft.mean": 0.5, "by_client.a_b_.requests": 2.0}

Install = Callable[[str, dict[str, Any]], None]


@pytest.fixture
def calls() -> list[tuple[Any, ...]]:
    return []


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a module in the place of one that need not be installed."""

    def put(name: str, members: dict[str, Any]) -> None:
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        for member, value in members.items():
            setattr(module, member, value)
        monkeypatch.setitem(sys.modules, name, module)

    return put


def fake_mlflow(calls: list[tuple[Any, ...]]) -> dict[str, Any]:
    return {
        "start_run": lambda *, run_name: calls.append(("start", run_name)),
        "log_params": lambda params: calls.append(("params", params)),
        "log_metrics": lambda metrics: calls.append(("metrics", metrics)),
        "end_run": lambda status: calls.append(("end", status)),
    }


def test_mlflow_gets_a_run_with_facts_and_numbers(
    install: Install, calls: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    install("mlflow", fake_mlflow(calls))
    send(["mlflow"], FACTS, METRICS, folder=tmp_path / "7")
    assert [call[0] for call in calls] == ["start", "params", "metrics", "end"]
    assert calls[0][1] == "7"
    assert calls[1][1]["workload.name"] == "trace"
    assert len(calls[1][1]["long"]) == 500
    assert calls[2][1] == NUMBERS
    assert calls[3][1] == "FINISHED"


def test_a_sink_that_fails_is_named_and_its_run_is_ended(
    install: Install, calls: list[tuple[Any, ...]], tmp_path: Path
) -> None:
    def fail(metrics: object) -> None:
        raise OSError("no route to host")

    install("mlflow", {**fake_mlflow(calls), "log_metrics": fail})
    with pytest.raises(TokenyardError, match=r"sink 'mlflow' did not take the run .*: no route to host"):
        send(["mlflow"], FACTS, METRICS, folder=tmp_path)
    assert calls[-1] == ("end", "FAILED")


def test_tensorboard_writes_below_the_run(install: Install, calls: list[tuple[Any, ...]], tmp_path: Path) -> None:
    class Writer:
        def __init__(self, folder: str) -> None:
            calls.append(("open", folder))

        def add_text(self, tag: str, text: str) -> None:
            calls.append(("text", tag, text))

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            calls.append(("scalar", tag, value, step))

        def close(self) -> None:
            calls.append(("close",))

    install("tensorboard", {})
    install("torch.utils.tensorboard", {"SummaryWriter": Writer})
    send(["tensorboard"], {"seed": 3}, METRICS, folder=tmp_path)
    assert calls[0] == ("open", str(tmp_path / "tensorboard"))
    assert ("text", "facts/seed", "3") in calls
    assert ("scalar", "ttft/mean", 0.5, 0) in calls
    assert calls[-1] == ("close",)


def test_wandb_gets_a_run_in_the_project_of_the_environment(
    install: Install, calls: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Run:
        def log(self, data: dict[str, float]) -> None:
            calls.append(("log", data))

        def finish(self, exit_code: int) -> None:
            calls.append(("finish", exit_code))

    def init(*, project: str, name: str, config: dict[str, str]) -> Run:
        calls.append(("init", project, name, config["seed"]))
        return Run()

    install("wandb", {"init": init})
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    send(["wandb"], FACTS, METRICS, folder=tmp_path / "0")
    assert calls == [("init", "mine", "0", "3"), ("log", NUMBERS), ("finish", 0)]


def test_a_sink_that_is_not_installed_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("mlflow", "wandb", "tensorboard"):
        monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
        with pytest.raises(ConfigError, match=rf"'{name}' is not installed; pip install 'tokenyard\[{name}\]'"):
            check_sinks([name])
    with pytest.raises(ConfigError, match="unknown sink 'excel'; there is: mlflow, tensorboard, wandb"):
        check_sinks(["excel"])


def test_without_sinks_nothing_is_imported(tmp_path: Path) -> None:
    send([], FACTS, METRICS, folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
