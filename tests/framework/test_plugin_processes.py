"""PLG-04: every process that needs plugins loads them once, for itself, whatever starts it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenyard.catalogue import DISABLED_VARIABLE

PROCESSES = """
import multiprocessing, os, sys
from tokenyard.config import PluginsConfig
from tokenyard.plugins import load_catalogue

CONFIG = PluginsConfig(disabled=("tokenyard",))

def child(config):
    first = load_catalogue(config)
    load_catalogue(PluginsConfig(disabled=("tokenyard",), strict=True))  # other settings, no second load
    if load_catalogue(config) is not first or "good_policy" not in first.names("policy"):
        os._exit(7)

if __name__ == "__main__":
    if sys.argv[2] == "parent_loads":
        load_catalogue(CONFIG)
    process = multiprocessing.get_context(sys.argv[1]).Process(target=child, args=(CONFIG,))
    process.start()
    process.join()
    print(os.getpid(), process.pid)
    sys.exit(process.exitcode)
"""


def run_processes(folder: Path, packages: Path, *arguments: str) -> tuple[int, int, list[int], list[int]]:
    """Parent, child, and the ids of the processes in which the plugin was imported and its hook called."""
    script, imports, hooks = folder / "processes.py", folder / "imports", folder / "hooks"
    script.write_text(PROCESSES)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(packages / "good"), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "GOOD_PLUGIN_IMPORT_FILE": str(imports),
        "GOOD_PLUGIN_HOOK_FILE": str(hooks),
    }
    environment.pop(DISABLED_VARIABLE, None)
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    parent, child = map(int, done.stdout.split())
    imported, called = ([int(line) for line in file.read_text().split()] for file in (imports, hooks))
    return parent, child, imported, called


@pytest.mark.parametrize("start_method", ["spawn", "fork"])
def test_plg_04_a_child_loads_exactly_once_for_itself(tmp_path: Path, packages_dir: Path, start_method: str) -> None:
    """PLG-04: a parent that needs no plugin loads none; the child that does, once."""
    _, child, imported, called = run_processes(tmp_path, packages_dir, start_method, "parent_does_not")
    assert imported == [child]
    assert called == [child]


def test_plg_04_parent_and_spawned_child_load_once_each(tmp_path: Path, packages_dir: Path) -> None:
    parent, child, imported, called = run_processes(tmp_path, packages_dir, "spawn", "parent_loads")
    assert imported == [parent, child]
    assert called == [parent, child]


def test_plg_04_a_forked_child_inherits_the_modules_and_asks_the_hooks_itself(
    tmp_path: Path, packages_dir: Path
) -> None:
    parent, child, imported, called = run_processes(tmp_path, packages_dir, "fork", "parent_loads")
    assert imported == [parent]
    assert called == [parent, child]
