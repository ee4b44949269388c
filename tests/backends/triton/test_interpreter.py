"""Runs the tests in `interpreter/`, in processes in which TRITON_INTERPRET is set before Triton is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

FOLDER = Path(__file__).with_name("interpreter")
# The suite's rule for backends that can do without a mask.
EXPECTED_SKIP = "refused: attention that is not causal is not available"


def run(path: Path, marked: str, report: Path) -> None:
    """Runs tests and fails with each of their failures; other skips, and no tests at all, are failures too."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        str(path),
        "-m",
        marked,
        f"--junitxml={report}",
        "-p",
        "no:cacheprovider",
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(command, env=environment, cwd=FOLDER.parents[3], capture_output=True, text=True, check=False)
    if not report.exists():
        pytest.fail(f"no report; it said:\n{done.stdout}{done.stderr}", pytrace=False)
    cases = list(ElementTree.parse(report).getroot().iter("testcase"))
    told = [
        f"{case.get('classname')}::{case.get('name')}\n{outcome.get('message')}\n{outcome.text}"
        for case in cases
        for outcome in case
        if outcome.tag in ("failure", "error", "skipped") and outcome.get("message") != EXPECTED_SKIP
    ]
    if told or not cases or done.returncode:
        headline = f"{len(told)} of {len(cases)} interpreted tests did not pass"
        raise AssertionError("\n\n".join([headline, *(told or [done.stdout, done.stderr])]))


@pytest.mark.slow
def test_what_runs_in_the_interpreter_passes(tmp_path: Path) -> None:
    run(FOLDER, "not slow", tmp_path / "report.xml")


@pytest.mark.slow
def test_what_takes_long_in_the_interpreter_passes_too(tmp_path: Path) -> None:
    run(FOLDER, "slow", tmp_path / "report.xml")


def test_a_failure_in_the_interpreter_is_told_with_its_text(tmp_path: Path) -> None:
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_it.py").write_text("def test_wrong():\n    assert 17 == 4711\n\ndef test_right():\n    pass\n")
    with pytest.raises(AssertionError, match=r"(?s)1 of 2 .*test_wrong.*assert 17 == 4711"):
        run(folder / "test_it.py", "not slow", tmp_path / "report.xml")
    with pytest.raises(AssertionError, match="0 of 0"):
        run(folder / "test_it.py", "slow", tmp_path / "other.xml")
