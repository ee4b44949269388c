"""Fixtures for tests of the plugin system: third-party packages put on sys.path, and a process that forgets them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest
from tokenyard.catalogue import DISABLED_VARIABLE
from tokenyard.plugins import forget_plugins

PACKAGES = Path(__file__).resolve().parent.parent / "fixtures" / "packages"


class Install(Protocol):
    """Make packages of tests/fixtures/packages look installed until the test ends."""

    def __call__(self, *names: str) -> None: ...


@pytest.fixture
def packages_dir() -> Path:
    """The folder of the fixture packages."""
    return PACKAGES


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """A function that installs fixture packages; afterwards nothing of them is left in the process."""
    monkeypatch.delenv(DISABLED_VARIABLE, raising=False)
    known_modules = set(sys.modules)
    forget_plugins()

    def put_on_path(*names: str) -> None:
        for name in names:
            folder = PACKAGES / name
            if not folder.is_dir():
                raise ValueError(f"no fixture package {name!r}")
            monkeypatch.syspath_prepend(folder)
        forget_plugins()

    yield put_on_path
    forget_plugins()
    for name in set(sys.modules) - known_modules:
        file = getattr(sys.modules[name], "__file__", None)
        if file and PACKAGES in Path(file).parents:
            del sys.modules[name]
