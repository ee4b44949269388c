"""benchmarks/simulation_speed.py runs to its end, and counts what it says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

Import = Callable[[str], ModuleType]


def test_each_policy_is_measured_and_a_missed_bar_is_the_exit_code(
    script: Import, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = script("simulation_speed")
    monkeypatch.setattr(module, "LEAST_STEPS", 0.0)
    arguments = ["--policies", "fcfs", "sjf", "--rounds", "1", "--limit", "20", "--json", str(tmp_path / "speed.json")]
    assert module.main(arguments) == 0
    *lines, report = capsys.readouterr().out.splitlines()
    told = json.loads(report)
    assert set(told["steps_a_second"]) == {"fcfs", "sjf"}
    assert all(speed > 0 for speed in told["steps_a_second"].values())
    assert told["own_arrivals"]["num_requests"] == 20
    assert sum(line.startswith("| ") for line in lines) == 4
    assert json.loads((tmp_path / "speed.json").read_text()) == told
    monkeypatch.setattr(module, "LEAST_STEPS", 1e12)
    assert module.main(arguments[:-2]) == 1
