"""PluginNames: what a new plugin's distribution, module and part are called, checked before anything is written."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.errors import UserError

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue

MAX_LENGTH = 40
_DISTRIBUTION = re.compile(r"[A-Za-z]([A-Za-z0-9._-]*[A-Za-z0-9])?", re.ASCII)
_PREFIX = "tokenyard_"
# What YAML or an override would not read as text, and what the core itself gives a meaning.
_NOT_TEXT = frozenset({"true", "false", "null", "none", "nan", "inf", "yes", "no", "on", "off", "y", "n", "auto"})


@dataclass(frozen=True, slots=True)
class PluginNames:
    """The names that follow from the one that was given."""

    distribution: str  # as pip knows it
    module: str  # as Python imports it
    plugin: str  # as configs choose it

    def refuse_taken(self, catalogue: Catalogue, kinds: Sequence[str]) -> None:
        """Raise UserError where an installed plugin of these kinds, or a module, has the name already."""
        if any(self.plugin in catalogue.names(kind) for kind in kinds):
            raise UserError(
                f"the name '{self.distribution}' gives the {kinds[0]} '{self.plugin}', which is installed already: two "
                "providers of one name are an error; choose another name"
            )
        if self.module in sys.stdlib_module_names or importlib.util.find_spec(self.module) is not None:
            raise UserError(
                f"the name '{self.distribution}' gives the module '{self.module}', which exists here already; choose "
                "another name"
            )


def plugin_names(given: str) -> PluginNames:
    """The names for a package that is called `given`; the module begins with it, the plugin drops `tokenyard_`."""
    if not _DISTRIBUTION.fullmatch(given) or len(given) > MAX_LENGTH:
        raise UserError(
            f"'{given}' is no name for a package: up to {MAX_LENGTH} letters, digits, '-', '_' and '.', beginning with "
            "a letter and ending with a letter or a digit"
        )
    module = re.sub(r"[-_.]+", "_", given).lower()
    plugin = module.removeprefix(_PREFIX)
    if keyword.iskeyword(module) or plugin in _NOT_TEXT or not plugin[0].isalpha():
        raise UserError(
            f"the name '{given}' gives the module '{module}' and the plugin '{plugin}', one of which would be read as "
            "something else than a name; choose another name"
        )
    return PluginNames(given, module, plugin)
