"""Fixtures of the backends' tests: the float64 reference, loaded by path (tests are no package)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def attention_reference() -> ModuleType:
    """The module reference.py beside this file."""
    name = "tokenyard_tests_attention_reference"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("reference.py"))
    if spec is None or spec.loader is None:
        raise RuntimeError("reference.py is not beside conftest.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module
