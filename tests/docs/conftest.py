"""Fixtures of the tests that keep the documentation true."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tokenyard.catalogue import DISABLED_VARIABLE
from tokenyard.plugins import forget_plugins

ROOT = Path(__file__).resolve().parent.parent.parent
REFERENCE = ROOT / "docs" / "reference"
EXAMPLE = ROOT / "docs" / "examples" / "tokenyard-wspt"


@pytest.fixture(scope="session")
def generator() -> Iterator[ModuleType]:
    """docs/reference/generate.py, loaded."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv(DISABLED_VARIABLE, raising=False)
        patch.syspath_prepend(REFERENCE)
        spec = importlib.util.spec_from_file_location("reference_generate", REFERENCE / "generate.py")
        if spec is None or spec.loader is None:
            raise LookupError("docs/reference/generate.py cannot be loaded")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module


@pytest.fixture
def example_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The example package looks installed: its sources and its metadata are on sys.path."""
    monkeypatch.delenv(DISABLED_VARIABLE, raising=False)
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = tmp_path / f"tokenyard_wspt-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n", encoding="utf-8"
    )
    points = "".join(f"{name} = {value}\n" for name, value in project["entry-points"]["tokenyard"].items())
    (info / "entry_points.txt").write_text(f"[tokenyard]\n{points}", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE / "src")
    forget_plugins()
    yield
    forget_plugins()
    for name in [name for name in sys.modules if name.partition(".")[0] == "tokenyard_wspt"]:
        del sys.modules[name]
