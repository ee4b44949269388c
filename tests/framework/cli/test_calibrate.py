"""`tokenyard calibrate`: the file that it writes, what it prints, and what it refuses."""

from __future__ import annotations

import json
import logging
import shlex
from pathlib import Path

import pytest
from planted_workloads import PlantedWorkload, planted
from tokenyard.cli import run
from tokenyard.experiments.run import run_workload
from tokenyard.interfaces import WorkloadRequest
from tokenyard.latency_fit import read_fit
from tokenyard.launch.overrides import quote_override

SMALL = (
    "model.dtype=float32",
    "model.max_model_len=128",
    "kv_cache.num_blocks=64",
    "scheduler.max_num_seqs=4",
    "scheduler.max_num_batched_tokens=64",
    "attention=torch_native",
)


def test_a_fit_is_written_told_and_drives_a_simulation(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "latency.json"
    assert run(["calibrate", str(tiny_llama_dir), "--to", str(path), "--seconds", "1", "--json", *SMALL]) == 0
    told = json.loads(capsys.readouterr().out)
    file = read_fit(str(path))
    assert told["path"] == str(path)
    assert told["fit"]["per_step"] == file.fit.per_step > 0
    assert file.machine["device"] == "cpu"
    assert file.machine["dtype"] == "float32"
    assert file.settings["model.name"] == str(tiny_llama_dir)
    assert min(file.in_sample.num_steps, file.held_out.num_steps) > 10
    assert 32 <= file.most_tokens <= 64
    simulated = [
        *("executor=simulated", "latency=fitted", quote_override("latency.path", str(path))),
        *(quote_override("model.name", str(tiny_llama_dir)), *SMALL),
    ]
    workload = PlantedWorkload([WorkloadRequest(arrival=0.0, num_prompt_tokens=9, num_output_tokens=5)])
    with caplog.at_level(logging.WARNING):
        record = run_workload(*planted(workload, simulated))
    assert 0 < record.requests.finish[0] < 60
    assert not [message for message in caplog.messages if "other settings" in message]


def test_the_overrides_that_use_a_fit_are_those_that_it_was_measured_with(
    tiny_llama_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a file.json"
    assert run(["calibrate", str(tiny_llama_dir), "--to", str(path), "--seconds", "1", *SMALL]) == 0
    told = capsys.readouterr().out.splitlines()[-1]
    use = shlex.split(told.removeprefix("use it with: "))
    assert set(SMALL) < set(use)
    assert (
        run(["simulate", *use, "workload=synthetic", "workload.prompt=9", "workload.limit=2", "workload.output=3"]) == 0
    )
    assert "other settings" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--seconds", "0.5"], "--seconds takes 1 to 3600; got 0.5"),
        (["--seconds", "nan"], "--seconds takes 1 to 3600; got nan"),
        (["--to", "nowhere/latency.json"], "there is no folder nowhere"),
        (["--to", "other.txt"], "there is something else; name another file"),
        (["executor=simulated", "latency=constant", "latency.per_step=1"], "executor=simulated runs no model"),
        (["engine.process=own"], "engine.process=own"),
    ],
)
def test_what_cannot_be_done_is_refused_before_the_model_is_loaded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    told: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.txt").write_text("mine")
    assert run(["calibrate", "no/such/model", *flags]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert (tmp_path / "other.txt").read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir()] == ["other.txt"]
