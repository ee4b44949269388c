"""docs/structure.md: a line for each module, and names in the two lives that exist."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
TEXT = (ROOT / "docs" / "structure.md").read_text(encoding="utf-8")
ENTRIES = re.findall(r"^- `([^`]+)`", TEXT, re.MULTILINE)
SOURCES = ("framework", "plugins", "backends")
LIVES = TEXT.partition("\n## The life of a request")[2]


def modules() -> Iterator[str]:
    for root in SOURCES:
        for path in (ROOT / root).rglob("*.py"):
            parts = path.relative_to(ROOT / root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folders(*names: str) -> Iterator[str]:
    for name in names:
        for path in (ROOT / name).iterdir():
            if path.is_dir() and any(item.is_file() for item in path.rglob("*[!c]")) and path.name[0] not in "._":
                yield f"{name}/{path.name}/"


def test_every_module_has_exactly_one_line() -> None:
    counts = Counter(name for name in ENTRIES if "/" not in name)
    assert sorted(counts) == sorted(modules())
    assert set(counts.values()) == {1}


def test_every_path_exists_and_no_folder_is_missing() -> None:
    paths = [name for name in ENTRIES if "/" in name]
    assert [name for name in paths if not (ROOT / name).exists()] == []
    assert len(set(paths)) == len(paths)
    assert set(folders("configs", "tests", "docs")) - set(paths) == set()


def test_every_line_says_something() -> None:
    lines = [line for line in TEXT.splitlines() if line.startswith("- `")]
    assert [line for line in lines if not re.fullmatch(r"- `[^`]+`: \S.+", line)] == []


def names_in_the_code() -> set[str]:
    """Classes, functions, and methods as `Class.method`."""
    found: set[str] = set()
    for root in SOURCES:
        for path in (ROOT / root).rglob("*.py"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    found.add(node.name)
                if isinstance(node, ast.ClassDef):
                    methods = (item for item in node.body if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef))
                    found |= {f"{node.name}.{item.name}" for item in methods}
    return found


NAMES_IN_THE_CODE = names_in_the_code()


@pytest.mark.parametrize("name", sorted(set(re.findall(r"`([A-Za-z_]\w*(?:\.\w+)?)`", LIVES))))
def test_every_name_in_the_lives_exists(name: str) -> None:
    assert name in NAMES_IN_THE_CODE
