"""A new plugin's files, made from the templates beside this module, and written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from string import Template
from types import MappingProxyType
from typing import TYPE_CHECKING

from tokenyard import PLUGIN_API, __version__
from tokenyard.errors import UserError

if TYPE_CHECKING:
    from tokenyard.cli.plugin_names import PluginNames


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """What differs between the packages of two kinds, besides the code."""

    description: str
    group: str  # of the config in which it is chosen
    name_spaces: tuple[str, ...]  # kinds of parts among which its name must be unique
    option: str  # one of its options, as an override
    preset: str  # YAML of the preset's own values
    modules: tuple[str, ...]  # beside __init__.py
    command: str = 'generate "Hello"'  # of `tokenyard`, in which it can be tried
    dependencies: tuple[str, ...] = ()  # beside tokenyard


KINDS: Mapping[str, Kind] = MappingProxyType(
    {
        "policy": Kind(
            description="A scheduling policy for Tokenyard: the shortest prompt first, with ageing.",
            group="scheduler",
            name_spaces=("policy", "scheduler"),
            option="scheduler.policy.ageing=5",
            preset="policy:\n  ageing: 100.0",
            modules=(),
        ),
        "attention": Kind(
            description="An attention backend for Tokenyard, in torch's own operators.",
            group="attention",
            name_spaces=("attention",),
            option="attention.upcast=false",
            preset="upcast: false",
            modules=("backend",),
            dependencies=("torch",),
        ),
        "kv_cache": Kind(
            description="A K/V cache manager for Tokenyard: block tables without a prefix cache.",
            group="kv_cache",
            name_spaces=("kv_cache",),
            option="kv_cache.reuse=oldest",
            preset="reuse: oldest",
            modules=("manager",),
            dependencies=("numpy",),
        ),
        "executor": Kind(
            description="An executor for Tokenyard: one worker in the engine's own process, and slow steps are told.",
            group="executor",
            name_spaces=("executor",),
            option="executor.slow_seconds=0.5",
            preset="slow_seconds: 0.25",
            modules=("executor",),
        ),
        "latency": Kind(
            description="A latency model for Tokenyard: reading the weights or computing the tokens, the longer one.",
            group="latency",
            name_spaces=("latency",),
            option="latency.weights=0.02",
            preset="weights: 0.005\nper_token: 0.00005",
            modules=(),
            command="simulate workload=synthetic",
        ),
        "workload": Kind(
            description="A workload for Tokenyard: requests that come in bursts.",
            group="workload",
            name_spaces=("workload",),
            option="workload.burst_size=20",
            preset="burst_size: 32\ninterval: 20.0",
            modules=(),
            command="simulate latency=constant latency.per_step=0.01",
        ),
    }
)


def package_files(kind: str, names: PluginNames) -> Mapping[str, str]:
    """Path -> content, of a package of that kind."""
    facts = KINDS[kind]
    source = f"src/{names.module}"
    sources = {
        "pyproject.toml": "every_kind/pyproject.toml",
        "README.md": "every_kind/README.md",
        f"{source}/configs/__init__.py": "every_kind/configs_init.py",
        f"{source}/configs/{facts.group}/{names.plugin}_preset.yaml": "every_kind/preset.yaml",
        f"{source}/__init__.py": f"{kind}/__init__.py",
        **{f"{source}/{name}.py": f"{kind}/{name}.py" for name in facts.modules},
        "tests/test_plugin.py": f"{kind}/test_plugin.py",
    }
    values = _values(facts, names)
    return {path: _rendered(template, values) for path, template in sources.items()} | {f"{source}/py.typed": ""}


def _values(kind: Kind, names: PluginNames) -> Mapping[str, str]:
    return {
        "distribution": names.distribution,
        "module": names.module,
        "plugin": names.plugin,
        "description": kind.description,
        "group": kind.group,
        "command": kind.command,
        "option": kind.option,
        "preset": kind.preset,
        "dependencies": json.dumps([f"tokenyard>={__version__}", *kind.dependencies]),
        "api_version": repr(PLUGIN_API),  # a literal over there: it stays what this plugin was written for
    }


def _rendered(template: str, values: Mapping[str, str]) -> str:
    text = (files("tokenyard.cli") / "templates" / f"{template}.tmpl").read_text(encoding="utf-8")
    return Template(text).substitute(values)


def write_package(parent: Path, name: str, contents: Mapping[str, str]) -> Path:
    """Make the folder `name` in `parent`; it appears whole or, when something fails, not at all. Returns its path.

    Raises UserError when there is something of that name already, or no folder to make it in.
    """
    if not parent.is_dir():
        raise UserError(f"there is no folder '{parent}' to make the package in; make it, or give another --path")
    target = parent / name
    if os.path.lexists(target):
        raise UserError(f"'{target}' exists; nothing is overwritten: choose another name, or another --path")
    workplace = Path(tempfile.mkdtemp(prefix=f".{name}.", dir=parent))  # the same file system, so a rename will do
    try:
        for path, content in contents.items():
            file = workplace / name / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(content, encoding="utf-8", newline="\n")
        (workplace / name).rename(target)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)
    return target
