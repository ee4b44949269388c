"""benchmarks/gpu_check.py on a machine without a GPU: it runs to its end, and names what it skips."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tokenyard.testing import AttentionBackendContract

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "gpu_check.py"
FIELDS = {"part", "backend", "status", "told", "seconds", "figures"}


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["gpu_check"] = module  # where its dataclasses look for their annotations
    spec.loader.exec_module(module)
    yield module
    del sys.modules["gpu_check"]


def run(tmp_path: Path, *arguments: str) -> tuple[dict[str, Any], str, int]:
    """The JSON, the table, and the exit code; from another folder, on a CPU, with torch_native alone."""
    file = tmp_path / "found.json"
    command = [sys.executable, str(SCRIPT), "--json", str(file), "--backends", "torch_native", *arguments]
    hidden = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=hidden)
    assert file.exists(), done.stderr
    return json.loads(file.read_text()), done.stdout, done.returncode


def by_part(report: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {result["part"]: result for result in report["results"]}


@pytest.mark.slow
def test_without_a_gpu_it_ends_well_and_skips_by_name(tmp_path: Path) -> None:
    report, table, code = run(tmp_path, "--minutes", "3", "--only", "attention", "decode", "memory")
    assert code == 0
    assert report["benchmark"] == "gpu_check"
    assert report["device"] == "cpu"
    assert {"torch", "triton", "python", "backends", "missing", "seconds"} <= set(report)
    found = by_part(report)
    assert all(set(result) == FIELDS for result in report["results"])
    assert {part: result["status"] for part, result in found.items()} == {
        "attention": "passed",
        "decode": "passed",
        "graphs": "skipped",
        "memory": "skipped",
    }
    assert found["memory"]["told"] == found["graphs"]["told"] == "needs a GPU"
    assert all(rate > 0 for rate in found["decode"]["figures"]["tokens_per_s"].values())
    assert [row["backend"] for row in found["attention"]["figures"]["rows"]][:1] != []
    assert len(table.splitlines()) == 1 + len(report["results"])


def test_time_that_is_over_ends_it_and_what_was_left_out_is_named(tmp_path: Path) -> None:
    report, _, code = run(tmp_path, "--minutes", "0.01")
    assert code == 0
    assert [(result["part"], result["status"]) for result in report["results"]] == [("machine", "skipped")]
    assert report["results"][0]["told"] == "no time is left"
    assert report["seconds"] < 30


@pytest.mark.slow
def test_the_contract_runs_as_in_the_backends_own_tests(tmp_path: Path) -> None:
    report, _, code = run(tmp_path, "--minutes", "4", "--only", "contract")
    result = by_part(report)["contract"]
    assert (code, result["status"]) == (0, "passed"), result
    assert result["figures"]["passed"] > 15


# ---- What is planned ------------------------------------------------------------------------------------------------

MACHINE: Mapping[str, Any] = {"device": "cuda", "backends": {"torch_native": [], "fast": [], "absent": ["no", "never"]}}


def test_on_a_gpu_every_part_runs_for_every_backend(script: ModuleType) -> None:
    planned = list(script.tasks(MACHINE, tuple(script.PARTS), None))
    assert planned[0] == ("all", "absent", "no; never")
    ran = [(task.part, task.backend) for task in planned if not task.why_not]
    assert ran == [
        ("contract", "torch_native"),
        ("contract", "fast"),
        ("equality", "fast"),  # torch_native is what it is compared with
        ("attention", ""),
        ("decode", "torch_native"),
        ("decode", "fast"),
        ("memory", ""),
    ]
    assert set(script.PARTS) == set(script.WEIGHTS) == set(script.NEEDS)


@pytest.mark.parametrize(("device", "least"), [("cpu", 0.5), ("cuda", 0.0)])
def test_on_a_cpu_no_short_part_is_ended_by_the_share_of_those_behind_it(
    script: ModuleType, device: str, least: float
) -> None:
    shares: list[float] = []

    def run(part: str, backend: str, device: str, share: float) -> list[Any]:
        shares.append(share)
        return [script.Result(part=part, figures={**MACHINE, "device": device_of_machine})]

    device_of_machine = device
    script.check(SimpleNamespace(run=run, left=60.0), tuple(script.PARTS), None)
    assert min(shares[1:]) >= least
    assert (min(shares[1:]) < 0.5) == (device == "cuda")
    assert shares[-1] == 1.0


def test_a_cpu_tries_families_that_there_are(script: ModuleType) -> None:
    assert set(script.CPU_FAMILIES) <= set(script.FAMILIES)


def test_only_chosen_backends_run(script: ModuleType) -> None:
    planned = list(script.tasks(MACHINE, ("contract", "equality"), ["fast", "absent"]))
    assert [task[:2] for task in planned] == [("all", "absent"), ("contract", "fast"), ("equality", "fast")]


def test_a_part_whose_packages_are_missing_is_skipped_with_their_names(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(script.NEEDS, "equality", ("pluggy", "hydra_that_is_not_there"))
    monkeypatch.setitem(script.INSTALL_AS, "hydra_that_is_not_there", "hydra-core")
    planned = list(script.tasks(MACHINE, ("contract", "equality"), None))
    assert ("equality", "", "not installed: hydra-core") in planned
    assert not [task for task in planned if task.part == "equality" and not task.why_not]


def test_what_is_claimed_of_a_backend_are_attributes_of_the_suite(script: ModuleType) -> None:
    for claims in (*script.CLAIMS.values(), script.CPU_CLAIMS):
        assert all(hasattr(AttentionBackendContract, name) for name in claims)


def test_plugins_are_found_through_the_checkouts_own_metadata(script: ModuleType, tmp_path: Path) -> None:
    environment = script.environment(tmp_path)
    site = environment["PYTHONPATH"].split(os.pathsep)[0]
    (found,) = metadata.distributions(path=[site])
    installed = metadata.distribution("tokenyard")
    assert (found.name, found.version) == (installed.name, installed.version)
    names = {point.name for point in found.entry_points if point.group == "tokenyard"}
    assert {"torch_native", "fcfs", "inproc"} <= names


# ---- What processes leave behind ------------------------------------------------------------------------------------


def line(script: ModuleType, **values: Any) -> str:
    return json.dumps(asdict(script.Result(**values)))


def test_of_each_part_the_last_result_of_a_process_counts(script: ModuleType) -> None:
    lines = [
        line(script, part="decode", backend="fast", status="unfinished"),
        "a line of somebody else",
        line(script, part="decode", backend="fast", told="done"),
        line(script, part="graphs", backend="fast", status="skipped"),
    ]
    decode, graphs = script._collected("decode", "fast", "\n".join(lines), "", 2.0)
    assert (decode.status, decode.told, decode.seconds) == ("passed", "done", 2.0)
    assert (graphs.part, graphs.status) == ("graphs", "skipped")


@pytest.mark.parametrize(
    ("before", "problem", "status"),
    [
        ("passed", "", "passed"),
        ("unfinished", "stopped after 9 s", "unfinished"),
        ("failed", "stopped after 9 s", "failed"),
        ("unfinished", "ended with code -11: it said nothing", "failed"),
        ("passed", "ended with code -6: it said nothing", "failed"),
    ],
)
def test_a_crash_is_a_failure_and_the_limit_of_time_is_none(
    script: ModuleType, before: str, problem: str, status: str
) -> None:
    out = line(script, part="contract", backend="fast", status=before, told="12 passed")
    (result,) = script._collected("contract", "fast", out, problem, 9.0)
    assert result.status == status
    assert result.told == "; ".join(filter(None, ["12 passed", problem]))


def test_a_process_that_crashes_before_it_says_anything_has_failed(script: ModuleType) -> None:
    (result,) = script._collected("memory", "", "", "ended with code 1: ImportError: no torch", 1.0)
    assert (result.part, result.status) == ("memory", "failed")
    assert "no torch" in result.told


# ---- Equality -------------------------------------------------------------------------------------------------------


def answer(tokens: Sequence[int], gaps: Sequence[float] | None = None) -> SimpleNamespace:
    """A RequestOutput whose two best tokens are so far apart at each position."""
    rows = [{0: SimpleNamespace(logprob=-1.0), 1: SimpleNamespace(logprob=-1.0 - gap)} for gap in gaps or ()]
    return SimpleNamespace(outputs=[SimpleNamespace(token_ids=list(tokens), logprobs=rows)])


def test_tokens_may_differ_only_where_the_choice_was_close(script: ModuleType) -> None:
    expected = [answer([1, 2, 3], [1.0, 0.1, 1.0]), answer([4, 5], [1.0, 1.0])]
    assert script.compare(expected, expected, 0.0) == ("2 of 2 equal", True)
    close = [answer([1, 9, 9]), expected[1]]
    assert script.compare(expected, close, 0.2) == ("1 of 2 equal, 1 ties", True)
    assert script.compare(expected, close, 0.05)[1] is False
    says, is_right = script.compare(expected, [expected[0], answer([4, 6])], 0.2)
    assert (says, is_right) == ("1 of 2 equal, others where the choice was 1 apart", False)


@pytest.mark.parametrize(
    ("arguments", "told", "code"),
    [
        (["--backends", "nope"], "no backend is called nope; there are: cpu_native, ", 1),
        (["--json", "missing/found.json"], "--json missing/found.json cannot be written: No such file", 2),
        (["--minutes", "nan"], "--minutes takes a number above 0, got nan", 2),
        (["--minutes", "-1"], "--minutes takes a number above 0, got -1.0", 2),
    ],
)
def test_a_mistake_in_what_is_given_is_told_at_the_start(
    tmp_path: Path, arguments: list[str], told: str, code: int
) -> None:
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert told in done.stdout + done.stderr
    assert done.returncode == code
