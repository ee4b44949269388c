"""docs/explanation/differences.md: every decision names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
PAGE = (ROOT / "docs" / "explanation" / "differences.md").read_text(encoding="utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ")][2:]
TESTS = {
    name
    for path in (ROOT / "tests" / "framework").rglob("test_*.py")
    for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.split("|")[1].strip()[:40])
def test_every_decision_names_a_test_that_exists(row: str) -> None:
    named = re.findall(r"`(test_\w+?)(_\.\.\.)?`", row.split("|")[-2])
    assert named, row
    for name, is_short in named:
        assert any(known.startswith(f"{name}_") if is_short else known == name for known in TESTS), name
