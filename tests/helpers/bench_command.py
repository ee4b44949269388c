"""`tokenyard bench` in this process: what it prints, and what it refuses."""

from __future__ import annotations

import json

import pytest
from tokenyard.cli import run


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    """(stdout, stderr) of a benchmark that succeeds."""
    code = run(["bench", *arguments])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out, captured.err


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    """The row of a benchmark, which is the only line on stdout."""
    out, _ = output_of(capsys, "--json", *arguments)
    assert out.count("\n") == 1
    row = json.loads(out)
    assert isinstance(row, dict)
    return row


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr of a command that must be refused."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("error: ")
    return line
