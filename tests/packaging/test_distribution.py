"""What is distributed: the wheel's content, editable installs, dependencies, entry points."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pins() -> dict[str, str]:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


@pytest.mark.slow
def test_hyd_02_the_wheel_has_every_config_module_and_licence(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    roots = {"framework": "", "plugins": "", "backends": "", "configs": "tokenyard/configs/"}
    for root, prefix in roots.items():
        for file in (ROOT / root).rglob("*"):
            if file.suffix in (".py", ".yaml", ".typed", ".tmpl", ".gz"):
                assert prefix + str(file.relative_to(ROOT / root)) in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert any(name.endswith("licenses/NOTICE") for name in names)
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]


@pytest.mark.slow
@pytest.mark.parametrize("editable", [False, True], ids=["pip install .", "pip install -e ."])
def test_both_kinds_of_install_find_configs_plugins_and_the_example(
    new_environment: Callable[[], object], tmp_path: Path, editable: bool
) -> None:
    environment = new_environment()
    environment.install(ROOT, editable=editable)  # type: ignore[attr-defined]
    environment.install(ROOT / "docs" / "examples" / "tokenyard-wspt", editable=editable)  # type: ignore[attr-defined]
    listed = environment.tokenyard("plugins", "--json", "scheduler=wspt", cwd=tmp_path)  # type: ignore[attr-defined]
    assert listed.returncode == 0, listed.stderr
    active = {row["name"] for row in json.loads(listed.stdout) if row["status"] == "active"}
    assert {"wspt", "batch", "sync", "paged", "inproc"} <= active
    shown = environment.tokenyard("config", "--json", "scheduler=wspt", cwd=tmp_path)  # type: ignore[attr-defined]
    assert json.loads(shown.stdout)["scheduler.policy.ageing"]["value"] == 0.0
    where = environment.run("-c", "import tokenyard; print(tokenyard.__file__)", cwd=tmp_path)  # type: ignore[attr-defined]
    assert where.stdout.strip().startswith(str(ROOT)) == editable


def test_the_pinned_cpu_build_of_torch_brings_no_gpu_packages() -> None:
    """Where pip has a CPU build for the pinned version, that is what must be installed."""
    pinned = pins()["torch"]
    plan = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "install", "--dry-run", "--no-deps", "--ignore-installed", "-q"),
            *("--report", "-", f"torch=={pinned}"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    if plan.returncode != 0:
        pytest.skip(f"pip cannot tell which build there is: {plan.stderr.strip().splitlines()[-1:]}")
    offered = json.loads(plan.stdout)["install"][0]["metadata"]["version"]
    if "+cpu" not in offered:
        pytest.skip(f"the index offers {offered}, not a CPU build")
    assert metadata.version("torch") == offered
    names = {(distribution.metadata["Name"] or "").lower() for distribution in metadata.distributions()}
    ours = {"nvidia-ml-py"}  # of tests/without-dependencies.txt: Python alone; triton is in the extra `dev`
    assert not {name for name in names - ours if name.startswith(("nvidia-", "cuda-"))}


def test_what_is_installed_is_what_constraints_pin() -> None:
    for name, pinned in pins().items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue  # a tool that this environment does without
        assert installed.partition("+")[0] == pinned, (
            f"{name}: the tests ran with something else than the pinned version"
        )


def test_every_direct_dependency_is_pinned() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    groups = ("dev", "testing", "sentencepiece", "triton", "xformers")  # flashinfer: tests/without-dependencies.txt
    wanted = [*PROJECT["project"]["dependencies"], *(text for name in groups for text in extras[name])]
    names = {re.split(r"[\[<>=!~ ]", requirement)[0] for requirement in wanted} - {"tokenyard"}
    assert names <= set(pins())


@pytest.mark.parametrize(
    ("name", "floor"),
    [("transformers", "5.10"), ("torch", "2.10"), ("jinja2", "3.1.6"), ("hydra-core", "1.3.8"), ("safetensors", "0.5")],
)
def test_b13_dependencies_start_where_known_holes_are_closed(name: str, floor: str) -> None:
    found = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    requirement = next(requirement for requirement in found if requirement.name == name)
    lowest = [Version(part.version) for part in requirement.specifier if part.operator == ">="]
    assert len(lowest) == 1
    assert lowest[0] >= Version(floor)
    assert Version(metadata.version(name)) >= Version(floor)


def test_the_version_is_the_distributions() -> None:
    import tokenyard

    assert tokenyard.__version__ == PROJECT["project"]["version"] == metadata.version("tokenyard")
