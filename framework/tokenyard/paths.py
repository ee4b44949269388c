"""Where Tokenyard's own files are, and where it keeps what it fetched."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path

from tokenyard.errors import ConfigError

_PACKAGE = Path(__file__).resolve().parent


def config_dir() -> Path:
    """The folder of the Hydra configs: inside the package when installed, beside `framework/` in a checkout."""
    packaged = _PACKAGE / "configs"
    return packaged if packaged.is_dir() else _PACKAGE.parent.parent / "configs"


def expose_configs() -> None:
    """Make `pkg://tokenyard.configs` resolve in a checkout too, where the folder is not inside the package."""
    name = "tokenyard.configs"
    folder = config_dir()
    if folder.parent == _PACKAGE or name in sys.modules or not (folder / "__init__.py").is_file():
        return
    spec = importlib.util.spec_from_file_location(
        name, folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    if spec is not None:
        sys.modules[name] = importlib.util.module_from_spec(spec)


def cache_dir() -> Path:
    """`TOKENYARD_CACHE`, else `tokenyard` in the user's cache folder; not created here.

    Raises ConfigError for a user without a home folder, as in a container that runs under a number.
    """
    try:
        if explicit := os.environ.get("TOKENYARD_CACHE"):
            return _expanded(explicit)
        base = os.environ.get("XDG_CACHE_HOME")
        return (_expanded(base) if base else Path.home() / ".cache") / "tokenyard"
    except RuntimeError as error:
        raise ConfigError(
            "this user has no home folder; set TOKENYARD_CACHE to a folder for models and compiled kernels"
        ) from error


def _expanded(text: str) -> Path:
    """Only one's own home: "~x" is a legal name of a folder."""
    return Path(text).expanduser() if text.startswith("~/") else Path(text)
