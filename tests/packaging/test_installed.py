"""The built wheel as its users meet it: another folder, another environment, a third party's plugin beside it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Protocol

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "docs" / "examples"

pytestmark = pytest.mark.slow


class Environment(Protocol):
    def run(self, *arguments: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]: ...
    def tokenyard(self, *arguments: str, cwd: Path, **options: object) -> subprocess.CompletedProcess[str]: ...
    def install(self, *packages: Path | str) -> None: ...


def test_the_command_answers_from_another_folder(
    installed: Environment, tmp_path: Path, default_model_dir: Path
) -> None:
    done = installed.tokenyard(
        "generate", "What is the capital of France?", "--max-tokens", "16", "--temperature", "0", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "first token" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_nothing_comes_from_the_checkout(installed: Environment, tmp_path: Path) -> None:
    modules = "tokenyard, tokenyard_plugins, tokenyard_backends, tokenyard.configs, hydra_plugins.tokenyard_searchpath"
    code = f"import {modules}; print([module.__file__ for module in ({modules})])"
    done = installed.run("-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert str(ROOT) not in done.stdout


def test_the_example_policy_is_installed_inactive_and_runs_when_named(
    installed: Environment, tmp_path: Path, tiny_llama_dir: Path
) -> None:
    rows = json.loads(installed.tokenyard("plugins", "--json", cwd=tmp_path).stdout)
    (row,) = [row for row in rows if row["name"] == "wspt"]
    assert (row["status"], row["distribution"]) == ("available", "tokenyard-wspt")
    explained = installed.tokenyard("plugins", "explain", "wspt", cwd=tmp_path).stdout
    assert "scheduler=wspt" in explained
    done = installed.tokenyard(
        *("generate", "hi", str(tiny_llama_dir), "--raw", "--json", "--max-tokens", "3", "--ignore-eos"),
        *("scheduler=wspt", "scheduler.policy.ageing=2"),
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)["token_ids"]) == 3
    preset = installed.tokenyard("config", "--json", "scheduler=wspt_fair", cwd=tmp_path)
    assert json.loads(preset.stdout)["scheduler.policy.ageing"]["value"] == 50.0


@pytest.mark.parametrize(
    ("override", "part"),
    [
        ("scheduler.policy.aging=2", "scheduler.policy.ageing"),
        ("scheduler.policy.ageing=fast", "scheduler.policy.ageing"),
        ("plugins.disabled=[wspt]", "plugins.disabled"),
        ("plugins.allow=[]", "plugins.allow"),
    ],
)
def test_a_mistake_in_a_third_partys_option_is_one_line(
    installed: Environment, tmp_path: Path, override: str, part: str
) -> None:
    done = installed.tokenyard("config", "scheduler=wspt", override, cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert part in line


def test_allow_takes_entry_points_and_distributions(installed: Environment, tmp_path: Path) -> None:
    for name in ("wspt", "tokenyard-wspt", "tokenyard_wspt"):
        assert installed.tokenyard("config", "scheduler=wspt", f"plugins.allow=[{name}]", cwd=tmp_path).returncode == 0
    done = installed.tokenyard("config", "plugins.allow=[typo]", cwd=tmp_path)
    assert done.returncode == 2
    assert "wspt" in done.stderr
    done = installed.tokenyard("config", "scheduler=wspt", cwd=tmp_path, env={"TOKENYARD_PLUGINS_DISABLED": "wspt"})
    assert done.returncode == 2
    assert "TOKENYARD_PLUGINS_DISABLED" in done.stderr


def test_the_offline_example_runs(installed: Environment, tmp_path: Path, default_model_dir: Path) -> None:
    shutil.copy(EXAMPLES / "offline.py", tmp_path)
    done = installed.run("offline.py", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "The capital of France is| Paris" in done.stdout
    assert "chat|" in done.stdout


def test_the_hydra_script_example_runs_with_its_own_and_our_overrides(
    installed: Environment, tmp_path: Path, default_model_dir: Path
) -> None:
    shutil.copytree(EXAMPLES / "hydra-script", tmp_path / "app")
    done = installed.run(
        "launch.py", "scheduler=wspt", "scheduler.policy.ageing=1", "max_tokens=8", cwd=tmp_path / "app"
    )
    assert done.returncode == 0, done.stderr
    assert "What is the capital of France? -> The capital of France is Paris" in done.stdout
    done = installed.run("launch.py", "scheduler=nope", cwd=tmp_path / "app")
    assert done.returncode != 0
    assert "nope" in done.stderr
    listed = installed.run("launch.py", "--info", "searchpath", cwd=tmp_path / "app")
    assert "pkg://tokenyard.configs" in listed.stdout + listed.stderr


def test_the_examples_own_tests_and_types_hold(tmp_path: Path) -> None:
    package = EXAMPLES / "tokenyard-wspt"
    env = {"PYTHONPATH": str(package / "src"), "MYPYPATH": str(package / "src")}
    tests = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(package / "tests"),
            "--rootdir",
            str(tmp_path),
        ],
        env={**os.environ, **env},
        capture_output=True,
        text=True,
        check=False,
    )
    assert tests.returncode == 0, tests.stdout
    types = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(package / "src")],
        env={**os.environ, **env},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert types.returncode == 0, types.stdout


def test_chat_streams_over_a_pipe(installed: Environment, tmp_path: Path, default_model_dir: Path) -> None:
    done = installed.tokenyard(
        "chat", "--temperature", "0", "--max-tokens", "12", cwd=tmp_path, stdin="What is the capital of France?\n"
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
