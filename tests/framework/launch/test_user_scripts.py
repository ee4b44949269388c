"""Hydra scripts of the user's own, as real processes; the third-party package tokenyard-wspt is installed there."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

RunPython = Callable[..., subprocess.CompletedProcess[str]]

_APP = """
import hydra, sys
@hydra.main(version_base=VERSION, config_path="conf", config_name="NAME")
def main(cfg):
    from tokenyard.launch.compose import load_engine_config_from
    config, _ = load_engine_config_from(cfg)
    print("RESULT", config.scheduler.policy, config.scheduler.max_num_seqs, config.plugins.allow, list(cfg))
    print("HEAVY", "torch" in sys.modules)
main()
"""

_PRIMARY = """
defaults: [tokenyard, _self_]
hydra:
  searchpath: [pkg://tokenyard.configs]
scheduler: {max_num_seqs: 8}
prompts: [hello]
"""


def _write_app(folder: Path, *, name: str = "my", version: str = '"1.3"', primary: str = _PRIMARY) -> None:
    (folder / "app.py").write_text(_APP.replace("VERSION", version).replace("NAME", name))
    (folder / "conf").mkdir()
    (folder / "conf" / f"{name}.yaml").write_text(primary)


@pytest.mark.parametrize(("name", "version"), [("my", '"1.3"'), ("config", '"1.3"'), ("my", "None"), ("my", '"1.2"')])
def test_a_script_composes_our_groups_and_a_third_partys_generated_node(
    name: str, version: str, tmp_path: Path, run_python: RunPython
) -> None:
    _write_app(tmp_path, name=name, version=version)
    arguments = ["app.py", "scheduler=wspt", "scheduler.policy.aging=7", "hydra.run.dir=out"]
    result = run_python("-W", "error::UserWarning", *arguments, cwd=tmp_path)
    assert "Options(aging=7.0)) 8 None" in result.stdout, result.stderr
    assert "'prompts'" in result.stdout
    assert "HEAVY False" in result.stdout
    assert result.stderr == ""


def test_a_third_partys_own_yaml_file_is_a_choice(tmp_path: Path, run_python: RunPython) -> None:
    _write_app(tmp_path)
    result = run_python("app.py", "scheduler=wspt_tuned", "--cfg", "job", cwd=tmp_path)
    assert "aging: 9.5" in result.stdout, result.stderr
    assert "max_num_seqs: 8" in result.stdout  # the script's own value, merged last


def test_a_file_of_the_scripts_own_can_build_on_a_generated_node(tmp_path: Path, run_python: RunPython) -> None:
    _write_app(tmp_path)
    (tmp_path / "conf" / "scheduler").mkdir()
    own = "defaults: [/tokenyard/scheduler/wspt@_here_, _self_]\npolicy: {aging: 4}\n"
    (tmp_path / "conf" / "scheduler" / "wspt.yaml").write_text(own)
    result = run_python("-W", "error::UserWarning", "app.py", "scheduler=wspt", "hydra.run.dir=out", cwd=tmp_path)
    assert "Options(aging=4.0)" in result.stdout, result.stderr


def test_hyd_02_the_search_path_lists_ours_and_the_third_partys(tmp_path: Path, run_python: RunPython) -> None:
    _write_app(tmp_path)
    result = run_python("app.py", "--info", "searchpath", cwd=tmp_path)
    assert "pkg://tokenyard.configs" in result.stdout, result.stderr
    assert "pkg://tokenyard_wspt_configs" in result.stdout


def test_a_script_that_allows_no_third_party_plugin_imports_none(tmp_path: Path, run_python: RunPython) -> None:
    _write_app(tmp_path, primary=_PRIMARY + "plugins: {allow: []}\n")
    refused = run_python("app.py", "scheduler=wspt", "hydra.run.dir=out", cwd=tmp_path)
    assert refused.returncode != 0
    assert "wspt" in refused.stderr
    verbose = run_python("-v", "app.py", "--cfg", "job", cwd=tmp_path)
    assert verbose.returncode == 0
    assert "tokenyard_wspt" not in verbose.stderr
    again = run_python("app.py", "scheduler=wspt", "plugins.allow=[wspt]", "hydra.run.dir=out", cwd=tmp_path)
    assert "aging=2.0" in again.stdout, again.stderr


def test_a_primary_config_stored_in_python_works_too(tmp_path: Path, run_python: RunPython) -> None:
    (tmp_path / "app.py").write_text(
        "import hydra\n"
        "from hydra.core.config_store import ConfigStore\n"
        "node = {'defaults': ['tokenyard', '_self_'], 'hydra': {'searchpath': ['pkg://tokenyard.configs']}}\n"
        "ConfigStore.instance().store(name='stored', node=node)\n"
        "@hydra.main(version_base='1.3', config_path=None, config_name='stored')\n"
        "def main(cfg): print('RESULT', cfg.scheduler.policy)\n"
        "main()\n"
    )
    result = run_python("app.py", "scheduler=wspt", "hydra.run.dir=out", cwd=tmp_path)
    assert "RESULT {'name': 'wspt', 'aging': 2.0}" in result.stdout, result.stderr


def test_an_application_that_has_nothing_to_do_with_us_loads_nothing_of_ours(
    tmp_path: Path, run_python: RunPython
) -> None:
    (tmp_path / "app.py").write_text(
        "import hydra, sys\n"
        "from hydra.core.config_store import ConfigStore\n"
        "@hydra.main(version_base='1.3', config_path='conf', config_name='config')\n"
        "def main(cfg):\n"
        "    ours = [name for name in sys.modules if name.startswith('tokenyard')]\n"
        "    print('RESULT', ours, sorted(ConfigStore.instance().repo), cfg)\n"
        "main()\n"
    )
    (tmp_path / "conf" / "scheduler").mkdir(parents=True)
    (tmp_path / "conf" / "config.yaml").write_text("defaults: [{scheduler: cosine}]\n")
    (tmp_path / "conf" / "scheduler" / "cosine.yaml").write_text("lr: 1\n")
    (tmp_path / "conf" / "broken.yaml").write_bytes(b"\xff\xfe[")
    result = run_python("app.py", "hydra.run.dir=out", cwd=tmp_path)
    expected = "RESULT [] ['_dummy_empty_config_.yaml', 'hydra'] {'scheduler': {'lr': 1}}\n"
    assert result.stdout == expected, result.stderr
    assert result.stderr == ""


def test_our_own_composition_inside_such_an_application_works(tmp_path: Path, run_python: RunPython) -> None:
    (tmp_path / "app.py").write_text(
        "import hydra\n"
        "@hydra.main(version_base='1.3', config_path=None)\n"
        "def main(cfg):\n"
        "    from hydra.core.hydra_config import HydraConfig\n"
        "    from tokenyard.launch.compose import compose_config\n"
        "    composed = compose_config(['scheduler=wspt'])\n"
        "    print('RESULT', composed.engine_config.scheduler.policy.name, HydraConfig.get().job.name)\n"
        "main()\n"
    )
    result = run_python("app.py", "hydra.run.dir=out", cwd=tmp_path)
    assert result.stdout == "RESULT wspt app\n", result.stderr


def test_a_wrong_value_of_a_preset_names_the_presets_file(tmp_path: Path, run_python: RunPython) -> None:
    code = (
        "from tokenyard.launch.compose import load_engine_config\n"
        "try:\n    load_engine_config(['scheduler=wspt_wrong'])\n"
        "except ValueError as error:\n    print(error)\n"
    )
    result = run_python("-c", code, cwd=tmp_path)
    told = "scheduler.policy.aging must be a number, got 'much' (text) (from tokenyard-wspt "
    assert result.stdout == f"{told}tokenyard_wspt_configs/scheduler/wspt_wrong.yaml)\n", result.stderr
