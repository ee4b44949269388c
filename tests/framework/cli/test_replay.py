"""`tokenyard replay`: what it says, and its exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenyard.cli import run
from tokenyard.testing import EngineHarness

LIMITS = ("scheduler.max_num_seqs=1", "kv_cache.num_blocks=20")


def record(path: Path, *overrides: str) -> Path:
    with EngineHarness([f"trace.path={path}", *LIMITS, *overrides]) as engine:
        for number in range(3):
            engine.add([1, 2, 3], f"r{number}", priority=-number, max_tokens=2)
        engine.run()
    return path


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    return record(tmp_path / "a.jsonl")


def test_an_identical_replay_says_so_and_exits_with_0(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(trace)]) == 0
    assert capsys.readouterr().out == "6 steps, identical\n"


def test_a_difference_is_told_with_its_step_and_exits_with_1(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(trace), "scheduler=priority"]) == 1
    assert capsys.readouterr().out.splitlines() == [
        "step 0 differs (order, record 4): who entered",
        "  recorded: r0",
        "  with the overrides: r2",
    ]


def test_overrides_that_change_no_decision_exit_with_0(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(trace), "kv_cache.eviction=fifo"]) == 0
    assert capsys.readouterr().out == "6 steps, the same decisions\n"


def test_a_shadow_of_a_recorded_run_is_counted(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(trace), "scheduler.shadow=priority"]) == 0
    assert (
        "shadow policy 'priority' would have decided otherwise: waiting_order 2 of 3 times" in capsys.readouterr().out
    )


def test_json_has_all_of_it(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", str(trace), "scheduler=priority", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["identical"] is False
    assert found["overrides"] == ["scheduler=priority"]
    assert found["difference"] == {
        "step": 0,
        "record": 4,
        "kind": "order",
        "what": "who entered",
        "left": "r0",
        "right": "r2",
    }


def test_diff_tells_configs_first_and_then_the_first_other_decision(
    trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = record(tmp_path / "b.jsonl", "scheduler=priority")
    assert run(["replay", "--diff", str(trace), str(other)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == 'config: scheduler.policy.name: "fcfs" in the first, "priority" in the second'
    assert lines[-3:] == ["step 0 differs (order, record 4): who entered", "  in the first: r0", "  in the second: r2"]
    assert run(["replay", "--diff", str(trace), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["difference"]["kind"] == "order"
    assert {"key": "scheduler.policy.name", "left": "fcfs", "right": "priority"} in found["config"]


def test_diff_of_a_trace_with_itself_is_identical(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["replay", "--diff", str(trace), str(trace)]) == 0
    assert capsys.readouterr().out == "6 steps, identical\n"


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ([], "replay takes one trace, got 0"),
        (["a", "b"], "two are compared with --diff"),
        (["--diff", "a"], "takes two traces and nothing else"),
        (["--diff", "a", "b", "scheduler=fcfs"], "takes two traces and nothing else"),
        (["nothing.jsonl"], "cannot be read"),
        (["nothing.jsonl", "--config", "x.yaml"], "leave out --config"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    arguments: list[str], why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["replay", *arguments]) == 2
    error = capsys.readouterr().err
    assert why in error
    assert len(error.splitlines()) == 1
