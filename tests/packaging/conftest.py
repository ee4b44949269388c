"""An environment with the built wheel and the example plugin in it, as a user's would be."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Environment:
    """A virtual environment; dependencies come from the one that runs the tests, Tokenyard from its own packages."""

    folder: Path

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    def run(
        self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the environment's python with these arguments."""
        return subprocess.run(
            [str(self.python), *arguments],
            cwd=cwd,
            env={**clean_environment(), **(env or {})},
            input=stdin,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    def tokenyard(
        self, *arguments: str, cwd: Path, env: Mapping[str, str] | None = None, stdin: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run the installed command."""
        return self.run(str(self.folder / "bin" / "tokenyard"), *arguments, cwd=cwd, env=env, stdin=stdin)

    def install(self, *packages: Path | str, editable: bool = False) -> None:
        """Install without dependencies and without a build environment: offline, and no second torch."""
        flags = ["--no-deps", "--no-build-isolation", "--disable-pip-version-check", "-q"]
        targets = [text for package in packages for text in (["-e"] if editable else []) + [str(package)]]
        done = subprocess.run(
            [sys.executable, "-m", "pip", "--python", str(self.python), "install", *flags, *targets],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr


def clean_environment() -> dict[str, str]:
    """The surroundings without what would let the checkout shine through."""
    dropped = ("PYTHONPATH", "VIRTUAL_ENV", "TOKENYARD_PLUGINS_DISABLED")
    return {name: value for name, value in os.environ.items() if name not in dropped} | {"OMP_NUM_THREADS": "1"}


def make_environment(folder: Path) -> Environment:
    venv.create(folder, with_pip=False)
    environment = Environment(folder)
    site = Path(
        subprocess.run(
            [str(environment.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
    )
    # A plain path line: .pth files over there, such as an editable install's, are not followed.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return environment


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout."""
    folder = tmp_path_factory.mktemp("dist")
    done = subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(ROOT)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (built,) = folder.glob("tokenyard-*.whl")
    return built


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    """The wheel and docs/examples/tokenyard-wspt."""
    environment = make_environment(tmp_path_factory.mktemp("installed") / "venv")
    environment.install(wheel)
    environment.install(ROOT / "docs" / "examples" / "tokenyard-wspt")
    return environment


@pytest.fixture
def new_environment(tmp_path: Path) -> Callable[[], Environment]:
    """Makes an empty environment."""
    return lambda: make_environment(tmp_path / "venv")


@pytest.fixture(scope="session")
def module_environment(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Environment]:
    """Makes an empty environment, for fixtures that several tests share."""
    return lambda: make_environment(tmp_path_factory.mktemp("environment") / "venv")
