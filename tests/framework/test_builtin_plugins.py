"""The hooks' own documentation, and Tokenyard's own plugins as a third party's are looked at."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import os
import subprocess
import sys
import textwrap
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
from tokenyard.catalogue import DISABLED_VARIABLE
from tokenyard.config import PluginsConfig
from tokenyard.descriptors import PLUGIN_API
from tokenyard.hookspecs import CONFIG_PATHS_HOOK, DESCRIPTOR_TYPES, HOOK_NAMES, TokenyardHooks
from tokenyard.plugins import forget_plugins, load_catalogue

ROOT = Path(__file__).resolve().parent.parent.parent

# ---- The hooks -------------------------------------------------------------------------------------------------------


def example_of(hook: str) -> ast.FunctionDef:
    """The example in a hook's docstring, parsed."""
    lines = (inspect.getdoc(vars(TokenyardHooks)[hook]) or "").splitlines()
    start = next(number for number, line in enumerate(lines) if line.strip() == "@hookimpl")
    (function,) = ast.parse(textwrap.dedent("\n".join(lines[start:]))).body
    if not isinstance(function, ast.FunctionDef):
        raise TypeError(f"the example of {hook} is no function")
    return function


def test_there_are_exactly_nine_hooks_and_none_takes_an_argument() -> None:
    specified = {name: member for name, member in vars(TokenyardHooks).items() if name.startswith("tokenyard_")}
    assert set(specified) == set(HOOK_NAMES)
    assert len(HOOK_NAMES) == 9
    for function in specified.values():
        assert list(inspect.signature(function).parameters) == ["self"]


@pytest.mark.parametrize("hook", HOOK_NAMES)
def test_every_hook_s_example_is_python_and_uses_its_descriptor_as_it_is(hook: str) -> None:
    example = example_of(hook)
    assert example.name == hook
    if hook == CONFIG_PATHS_HOOK:
        return
    (call,) = [node for node in ast.walk(example) if isinstance(node, ast.Call)]
    expected = DESCRIPTOR_TYPES[hook]
    fields = dataclasses.fields(expected)
    given = {keyword.arg for keyword in call.keywords}
    required = {field.name for field in fields if field.default is dataclasses.MISSING}
    assert isinstance(call.func, ast.Name)
    assert call.func.id == expected.__name__
    assert required <= given <= {field.name for field in fields}


def test_every_hook_yields_a_kind_of_its_own() -> None:
    kinds = [descriptor_type.kind for descriptor_type in DESCRIPTOR_TYPES.values()]
    assert len(set(kinds)) == len(kinds) == 8


# ---- Tokenyard's own plugins -----------------------------------------------------------------------------------------


def own_entry_points() -> dict[str, str]:
    return {point.name: point.value for point in metadata.distribution("tokenyard").entry_points if is_plugin(point)}


def is_plugin(point: metadata.EntryPoint) -> bool:
    return point.group == "tokenyard"


def declared_entry_points() -> dict[str, str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared: dict[str, str] = project["entry-points"]["tokenyard"]
    return declared


def test_the_installed_entry_points_are_those_of_pyproject() -> None:
    assert own_entry_points() == declared_entry_points(), "install the checkout again: its entry points have changed"


def test_every_built_in_plugin_has_an_entry_point_and_every_entry_point_a_module() -> None:
    plugins = {f"tokenyard_plugins.{path.stem}" for path in (ROOT / "plugins/tokenyard_plugins").glob("[!_]*.py")}
    backends = {
        f"tokenyard_backends.{path.parent.name}.plugin"
        for path in (ROOT / "backends/tokenyard_backends").glob("*/plugin.py")
    }
    assert set(declared_entry_points().values()) == plugins | backends


IMPORT_WITHOUT_HEAVY = """
import sys
for name in ("torch", "triton", "flashinfer", "xformers"):
    sys.modules[name] = None
from tokenyard.config import PluginsConfig
from tokenyard.plugins import load_catalogue
catalogue = load_catalogue(PluginsConfig(allow=()))
for failure in catalogue.failures:
    print(failure)
if not catalogue.entries():
    print("no component at all")
"""


def test_every_own_plugin_loads_without_torch_triton_flashinfer_and_xformers() -> None:
    environment = {name: value for name, value in os.environ.items() if name != DISABLED_VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT_HEAVY],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""


def test_own_plugins_are_free_of_conflicts_and_of_the_current_api() -> None:
    forget_plugins()
    catalogue = load_catalogue(PluginsConfig(allow=(), strict=True))
    assert {entry.provider.distribution for entry in catalogue.entries()} == {"tokenyard"}
    assert {entry.descriptor.api_version for entry in catalogue.entries()} == {PLUGIN_API}
