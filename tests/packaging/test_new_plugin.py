"""The packages that `tokenyard new-plugin` writes, untouched: installed beside the wheel, tested, checked and run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import pytest
from tokenyard.cli.plugin_package import KINDS

pytestmark = pytest.mark.slow

KIND_NAMES = sorted(KINDS)


class Environment(Protocol):
    @property
    def python(self) -> Path: ...
    def run(self, *arguments: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]: ...
    def tokenyard(self, *arguments: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]: ...
    def install(self, *packages: Path | str) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("packages")


@pytest.fixture(scope="module")
def environment(wheel: Path, folder: Path, module_environment: Callable[[], Environment]) -> Environment:
    """The wheel, and a package of each kind written by it and installed from its folder."""
    made = module_environment()
    made.install(wheel)
    for kind in KIND_NAMES:
        done = made.tokenyard("new-plugin", f"tokenyard-my-{kind}", "--kind", kind, cwd=folder)
        assert done.returncode == 0, done.stderr
        made.install(folder / f"tokenyard-my-{kind}")
    return made


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_it_passes_the_suite_of_its_kind(environment: Environment, folder: Path, kind: str) -> None:
    done = environment.run("-m", "pytest", "-q", "-p", "no:cacheprovider", cwd=folder / f"tokenyard-my-{kind}")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_its_types_are_complete(environment: Environment, folder: Path, tmp_path: Path, kind: str) -> None:
    package = folder / f"tokenyard-my-{kind}"
    done = environment.run("-m", "mypy", "--strict", "--cache-dir", str(tmp_path), cwd=package)
    assert done.returncode == 0, done.stdout
    # pyright reads no .pth file of another environment, so it is shown the one that runs the tests.
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "src"]
    done = subprocess.run(command, cwd=package, env=os.environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("preset", ["", "_preset"])
@pytest.mark.parametrize("kind", KIND_NAMES)
def test_it_generates(environment: Environment, folder: Path, tiny_llama_dir: Path, kind: str, preset: str) -> None:
    words = ("generate", "hi", str(tiny_llama_dir), "--raw", "--json", "--max-tokens", "3", "--ignore-eos")
    done = environment.tokenyard(*words, "--temperature", "0", f"{KINDS[kind].group}=my_{kind}{preset}", cwd=folder)
    assert done.returncode == 0, done.stderr
    usual = environment.tokenyard(*words, "--temperature", "0", cwd=folder)
    assert json.loads(done.stdout)["token_ids"] == json.loads(usual.stdout)["token_ids"]


def test_a_second_package_of_the_name_is_refused(environment: Environment, folder: Path, tmp_path: Path) -> None:
    done = environment.tokenyard("new-plugin", "tokenyard-my-policy", "--kind", "policy", cwd=tmp_path)
    assert done.returncode == 2
    assert "'my_policy', which is installed already" in done.stderr
    assert list(tmp_path.iterdir()) == []
