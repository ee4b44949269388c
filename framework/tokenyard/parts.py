"""Calling a plugin's factory: in the engine process for most parts, in the worker's for attention backends."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from tokenyard.descriptors import Descriptor, kind_of
from tokenyard.errors import PluginError, TokenyardError

DescriptorT = TypeVar("DescriptorT", bound=Descriptor[object])
PartT = TypeVar("PartT")


def make_part(descriptor: DescriptorT, expected: type[PartT], build: Callable[[DescriptorT], PartT]) -> PartT:
    """Call a plugin's factory; what it raises, or makes instead of the part, is told with the plugin's name."""
    try:
        part = build(descriptor)
    except TokenyardError:
        raise
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"{kind_of(descriptor)} '{descriptor.name}' failed to start: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(part, expected):
        raise PluginError(
            f"{kind_of(descriptor)} '{descriptor.name}' is broken: its factory made a {type(part).__name__}, "
            f"not a {expected.__name__}"
        )
    return part
