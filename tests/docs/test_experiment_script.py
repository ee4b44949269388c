"""The Hydra script of docs/how-to/experiments-in-your-own-script.md runs as it is printed, with Hydra's multirun."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from tokenyard.experiments.run_folder import read_run

PAGE = Path(__file__).resolve().parent.parent.parent / "docs" / "how-to" / "experiments-in-your-own-script.md"


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)


def test_the_script_makes_folders_that_can_be_read(tmp_path: Path) -> None:
    (config,) = blocks("yaml")
    script = blocks("python")[1]
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "app.yaml").write_text(config, encoding="utf-8")
    (tmp_path / "app.py").write_text(script, encoding="utf-8")
    command = [sys.executable, "app.py", "-m", "scheduler=fcfs,sjf", "hydra.sweep.dir=out", "workload.limit=5"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    runs = [read_run(tmp_path / "out" / number) for number in ("0", "1")]
    assert [run.overrides for run in runs] == [
        ["scheduler=fcfs", "workload.limit=5"],
        ["scheduler=sjf", "workload.limit=5"],
    ]
    assert all(len(run.record.requests) == 5 for run in runs)
    assert runs[0].facts["config_hash"] != runs[1].facts["config_hash"]


def test_the_first_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(blocks("python")[0], str(PAGE), "exec"), {})
    assert re.match(r"\d+\.\d+ [0-9a-f]{64}\n", capsys.readouterr().out)
