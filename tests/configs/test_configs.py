"""The YAML files themselves, and whether they reach an installed package."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tokenyard.launch.compose import compose_config
from tokenyard.launch.schema import COMPONENT_GROUPS, core_fields

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
REQUIRED = {
    "latency/constant.yaml": ["latency.per_step=0.01"],
    "latency/linear.yaml": ["latency.per_step=0.01", "latency.per_token=0.0001"],
    "latency/shared.yaml": ["latency.per_request=0.01"],
    "latency/profiled.yaml": ["latency.profile=rtx4090-llama-3.1-8b"],
    "latency/roofline.yaml": ["latency.device=h100", "latency.model=llama-3.1-8b"],
    "latency/fitted.yaml": ["latency.path=latency.json"],
    "workload/trace.yaml": ["workload.path=requests.jsonl"],
}
FILES = sorted(path.relative_to(CONFIGS).as_posix() for path in CONFIGS.rglob("*.yaml"))


@pytest.mark.parametrize("file", FILES)
def test_a_file_names_components_and_holds_no_default(file: str) -> None:
    content = OmegaConf.to_container(OmegaConf.load(CONFIGS / file))
    assert isinstance(content, dict)
    if file.startswith("workload/") and content["name"] != Path(file).stem:
        assert len(content) > 2, "a preset that sets nothing"  # of a workload that another file names
        return
    assert set(content) <= {"defaults", "name", "policy"}
    assert set(content.get("policy", {})) <= {"name"}


@pytest.mark.parametrize("file", [file for file in FILES if file.partition("/")[0] in COMPONENT_GROUPS])
def test_every_option_of_a_group_composes(file: str) -> None:
    group, _, name = file.removesuffix(".yaml").partition("/")
    node = compose_config([f"{group}={name}", *REQUIRED.get(file, [])]).values[group]
    assert isinstance(node, dict)
    assert set(core_fields(COMPONENT_GROUPS[group])) <= set(node)


def test_the_configs_leave_hydras_own_settings_alone() -> None:
    assert not [file for file in FILES if "hydra" in (CONFIGS / file).read_text()]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for needed in ("build", "hatchling"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed: no wheel can be built offline")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "build", "--no-isolation", "--wheel", "--outdir", str(folder), str(ROOT)]
    built = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert built.returncode == 0, built.stdout + built.stderr
    return next(folder.glob("*.whl"))


@pytest.mark.slow
def test_hyd_02_the_wheel_has_every_yaml_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".yaml")]
    assert sorted(name.removeprefix("tokenyard/configs/") for name in names) == FILES


@pytest.mark.slow
def test_hyd_02_the_configs_are_read_from_a_zipped_wheel(wheel: Path, tmp_path: Path) -> None:
    code = (
        "import tokenyard; from tokenyard.launch.compose import compose_config;"
        "print(tokenyard.__file__); print(compose_config([]).origins['engine.name'])"
    )
    variables = {**os.environ, "PYTHONPATH": str(wheel)}
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    where, origin = result.stdout.splitlines() or ("", result.stderr)
    assert where.startswith(str(wheel)), result.stderr
    assert origin == "configs/engine/sync.yaml"
