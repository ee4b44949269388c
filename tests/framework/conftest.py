"""Fixtures for tests with plugins: third-party packages put on sys.path, and parts put into a catalogue."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Protocol

import pytest
from tokenyard.catalogue import DISABLED_VARIABLE, Catalogue, Entry, Provider
from tokenyard.descriptors import Descriptor
from tokenyard.plugins import forget_plugins, load_catalogue

PACKAGES = Path(__file__).resolve().parent.parent / "fixtures" / "packages"


class Install(Protocol):
    """Make packages of tests/fixtures/packages look installed until the test ends."""

    def __call__(self, *names: str) -> None: ...


class CatalogueWith(Protocol):
    """The installed plugins and these parts, which take the place of installed ones of their kind and name."""

    def __call__(self, *descriptors: Descriptor[object]) -> Catalogue: ...


@pytest.fixture
def catalogue_with() -> CatalogueWith:
    """A function that makes a catalogue with parts of the test's own."""
    provider = Provider(distribution="third-party", version="1", entry_point="third")

    def make(*descriptors: Descriptor[object]) -> Catalogue:
        names = {(descriptor.kind, descriptor.name) for descriptor in descriptors}
        own = [entry for entry in load_catalogue().entries() if (entry.kind, entry.name) not in names]
        return Catalogue([*own, *(Entry(descriptor=descriptor, provider=provider) for descriptor in descriptors)])

    return make


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


@pytest.fixture(scope="module")
def window_model(tmp_path_factory: pytest.TempPathFactory, tiny_llama_dir: Path) -> Callable[[str], Path]:
    """Writes a model of a family of `window_models` once."""
    import window_models  # imports torch and transformers, which few tests need

    root = tmp_path_factory.mktemp("windows")

    def get(family: str) -> Path:
        folder = root / family
        return folder if folder.exists() else window_models.write_window_model(folder, family, tiny_llama_dir)

    return get
