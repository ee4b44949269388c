"""Brings Tokenyard's config groups into Hydra applications that name `tokenyard.configs`.

Hydra runs this in every application of the environment. In those that do not name it, it must cost next to nothing,
import nothing of Tokenyard, and never fail. What the others write is told in tokenyard.launch.searchpath.
"""

from __future__ import annotations

import importlib.resources
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.config_store import ConfigNode, ConfigStore
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from importlib.resources.abc import Traversable

    from hydra.core.config_search_path import ConfigSearchPath

_MODULE = "tokenyard.configs"
_MAX_FILES = 200
_MAX_BYTES = 1 << 20
_FOLDER_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp")


class TokenyardSearchPath(SearchPathPlugin):
    """Called by Hydra once per application, before its config is read."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if _is_own_composition():
            return
        arguments = sys.argv[1:]
        folders = [element.path for element in search_path.get_path() if element.provider == "main" and element.path]
        texts = list(_texts_that_name_us([*folders, *_folders_in(arguments)]))
        if texts or _is_named_in([*folders, *arguments]) or _is_named_in_store():
            from tokenyard.launch.searchpath import extend  # only here: it loads plugins

            extend(search_path, texts=texts, arguments=arguments)


def _is_own_composition() -> bool:
    """Tokenyard's own use of Hydra brings its nodes itself."""
    session = sys.modules.get("tokenyard.launch.session")
    return session is not None and bool(session.is_composing.get())


def _is_named_in(words: Sequence[str]) -> bool:
    return any(_MODULE in word for word in words)


def _folders_in(arguments: Sequence[str]) -> Iterator[str]:
    for index, argument in enumerate(arguments):
        name, equals, value = argument.partition("=")
        if name in _FOLDER_FLAGS:
            yield from [value] if equals else arguments[index + 1 : index + 2]


def _is_named_in_store() -> bool:
    """Whether a primary config that was stored in Python has it in hydra.searchpath."""
    nodes = [node for node in ConfigStore.instance().repo.values() if isinstance(node, ConfigNode)]
    return any(_MODULE in _stored_search_path(node) for node in nodes)


def _stored_search_path(node: ConfigNode) -> str:
    with suppress(Exception):  # somebody else's config, whatever is in it
        return str(OmegaConf.select(node.node, "hydra.searchpath"))
    return ""


def _texts_that_name_us(folders: Sequence[str]) -> Iterator[str]:
    """The YAML files directly in the primary config folder which name our configs."""
    for folder in folders:
        with suppress(Exception):  # Hydra itself tells what is wrong with the folder
            yield from (text for text in _texts_in(folder) if _MODULE in text)


def _texts_in(folder: str) -> Iterator[str]:
    root = _root(folder)
    files = [file for file in root.iterdir() if file.name.endswith((".yaml", ".yml"))] if root else []
    for file in files[:_MAX_FILES]:
        with file.open("rb") as stream:
            yield stream.read(_MAX_BYTES).decode("utf-8", errors="replace")


def _root(folder: str) -> Traversable | None:
    scheme, separator, rest = folder.partition("://")
    if not separator or scheme == "file":
        return Path(rest if separator else folder)
    if scheme != "pkg":
        return None
    return importlib.resources.files(rest.replace("/", ".").strip("."))
