"""The descriptors of what a config names."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeVar

from tokenyard.descriptors import Descriptor
from tokenyard.errors import PluginError
from tokenyard.platform import Platform

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue

DescriptorT = TypeVar("DescriptorT", bound=Descriptor[object])


def chosen(catalogue: Catalogue, kind: str, name: str, expected: type[DescriptorT]) -> DescriptorT:
    """The descriptor that the config names; raises PluginError when it cannot run here."""
    entry = catalogue.get(kind, name)
    if not isinstance(entry.descriptor, expected):
        raise PluginError(f"'{name}' is registered as {kind} but described by {type(entry.descriptor).__name__}")
    if reasons := entry.unavailable_reasons(Platform()):
        raise PluginError(f"{kind} '{name}' cannot run here: {'; '.join(reasons)}")
    return entry.descriptor
