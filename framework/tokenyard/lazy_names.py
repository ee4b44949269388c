"""Public names of a package, each loaded when it is first used."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping


def load_name(package: str, home: Mapping[str, str], name: str) -> object:
    """For a package's `__getattr__`: the name from the module that `home` says, kept in the package from then on."""
    if name not in home:
        raise AttributeError(f"module '{package}' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(home[name]), name)
    setattr(sys.modules[package], name, value)
    return value
