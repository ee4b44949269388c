"""What two processes compare before they work together: versions, and what their plugins provide."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING

from tokenyard.descriptors import PLUGIN_API
from tokenyard.errors import PluginError
from tokenyard.ipc.messages import WIRE_VERSION, ComponentMessage, Identity

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.catalogue import Catalogue

_REMEDY = "was the installation changed while it ran? restart the program"


def own_identity() -> Identity:
    """Of this process."""
    try:
        version = metadata.version("tokenyard")
    except metadata.PackageNotFoundError:
        version = "unknown"
    return Identity(WIRE_VERSION, version, PLUGIN_API)


def components_of(catalogue: Catalogue) -> list[ComponentMessage]:
    """Every usable component, with who provides it."""
    return [
        ComponentMessage(entry.kind, entry.name, entry.provider.distribution, entry.provider.version)
        for entry in catalogue.entries()
    ]


def check_identity(theirs: Identity, who: str) -> None:
    """Raise PluginError unless the other process, called `who`, is of this version."""
    ours = own_identity()
    if theirs != ours:
        raise PluginError(
            f"{who} is of another version than this process: {_told(theirs)}, not {_told(ours)}; {_REMEDY}"
        )


def check_components(theirs: Sequence[ComponentMessage], ours: Sequence[ComponentMessage], who: str) -> None:
    """Raise PluginError unless the other process's plugins provide what this one's do."""
    there, here = set(theirs), set(ours)
    if there == here:
        return
    only_there, only_here = (sorted(map(_component, some)) for some in (there - here, here - there))
    parts = [f"only {who} has {', '.join(only_there)}"] if only_there else []
    parts += [f"{who} lacks {', '.join(only_here)}"] if only_here else []
    raise PluginError(
        f"two processes of one engine find different plugins: {'; '.join(parts)}. Each process loads the installed "
        "plugins for itself; a component that only a program registers cannot be used with a process of its own"
    )


def _told(identity: Identity) -> str:
    major, minor = identity.plugin_api
    return f"Tokenyard {identity.tokenyard_version}, plugin API {major}.{minor}, wire version {identity.wire_version}"


def _component(one: ComponentMessage) -> str:
    return f"{one.kind} '{one.name}' of {one.distribution} {one.version}"
