"""What a person is told of a run on a screen."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenyard.cli import run

LINEAR = ("latency=linear", "latency.per_step=0.01", "latency.per_token=1e-5")


def test_where_requests_and_times_are_from_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    roofline = ("latency=roofline", "latency.device=h100", "latency.model=llama-3.1-8b")
    assert run(["simulate", "workload=azure_conv", "workload.limit=5", *roofline]) == 0
    workload, latency, *_ = capsys.readouterr().out.splitlines()
    assert workload.startswith("workload: trace: ")
    assert "CC-BY-4.0" in workload
    assert latency.startswith("latency: roofline: datasheet of h100")
    assert "error" in latency


def test_preemptions_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    short = ("kv_cache.num_blocks=10", "kv_cache.block_size=16", "model.max_model_len=100", "workload.prompt=48")
    given = ("workload=synthetic", "workload.limit=4", "workload.output=32", "workload.arrivals=all_at_once")
    assert run(["simulate", *given, *short, *LINEAR]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if " preemptions" in line]
    assert int(line.split(" preemptions")[0].rsplit(maxsplit=1)[-1]) > 0


def test_the_table_of_an_experiment_says_its_unit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ("workload=synthetic", "workload.limit=2", "workload.output=1,2", *LINEAR)
    assert run(["experiment", "-m", *given, "--out", str(tmp_path / "e")]) == 0
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split()[:2] == ["run", "milliseconds"]
    assert [row.split()[1] for row in rows] == ["workload.output=1", "workload.output=2"]
