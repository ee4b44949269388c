"""The catalogue: what the loaded plugins provide, by kind and name, and what is known of those that were left out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tokenyard.descriptors import PLUGIN_API, Descriptor, kind_of
from tokenyard.errors import PluginConflictError, PluginError, did_you_mean

if TYPE_CHECKING:
    from tokenyard.platform import Platform

BUILTIN_DISTRIBUTION = "tokenyard"
DISABLED_VARIABLE = "TOKENYARD_PLUGINS_DISABLED"

BlockReason = Literal["plugins.disabled", "plugins.allow", "TOKENYARD_PLUGINS_DISABLED"]

_SHARED_NAME_SPACE = ("scheduler", "policy")  # `scheduler=NAME` chooses either
_UNBLOCK: Mapping[BlockReason, str] = {
    "plugins.disabled": "remove it from plugins.disabled",
    "plugins.allow": "add it to plugins.allow",
    "TOKENYARD_PLUGINS_DISABLED": f"remove it from the environment variable {DISABLED_VARIABLE}",
}


def normalise(name: str) -> str:
    """One spelling for names that differ only in case or in `-`, `_` and `.`, as package indexes have it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def format_api(version: tuple[int, int]) -> str:
    """`1.1` for (1, 1)."""
    return f"{version[0]}.{version[1]}"


def is_compatible(api_version: tuple[int, int]) -> bool:
    """Whether a descriptor built for `api_version` can be used: our major, and no newer minor."""
    return api_version[0] == PLUGIN_API[0] and api_version[1] <= PLUGIN_API[1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Provider:
    """One plugin: an entry point of an installed distribution."""

    distribution: str
    version: str
    entry_point: str

    def __str__(self) -> str:
        return f"plugin '{self.entry_point}' of {self.distribution} {self.version}"

    @property
    def is_builtin(self) -> bool:
        return normalise(self.distribution) == BUILTIN_DISTRIBUTION

    def bears(self, name: str) -> bool:
        """Whether the entry point or the distribution has this name, `tokenyard-` in front of it or not."""
        own = (self.entry_point, self.distribution)
        return _bare(name) in {_bare(candidate) for candidate in own}


def _bare(name: str) -> str:
    return normalise(name).removeprefix("tokenyard-")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A component that can be chosen, and who provides it."""

    descriptor: Descriptor[object]
    provider: Provider

    @property
    def name(self) -> str:
        return self.descriptor.name

    @property
    def kind(self) -> str:
        """`policy`, `attention`, ...; for an open-ended component its own kind."""
        return kind_of(self.descriptor)

    @property
    def incompatibility(self) -> str | None:
        """Why the API it was built for cannot be served, and what to do; None when it can."""
        built_for = self.descriptor.api_version
        if is_compatible(built_for):
            return None
        ours = format_api(PLUGIN_API)
        remedy = f"upgrade {self.provider.distribution}"
        if built_for > PLUGIN_API:
            remedy = f"upgrade Tokenyard, or install a release of {self.provider.distribution} for API {ours}"
        return f"it was built for plugin API {format_api(built_for)} and this Tokenyard has {ours}: {remedy}"

    def unavailable_reasons(self, platform: Platform) -> list[str]:
        """Why it cannot run here; empty = it can. A `requires` that raises is a reason itself."""
        try:
            reasons = self.descriptor.requires(platform)
            return [reasons] if isinstance(reasons, str) else [str(reason) for reason in reasons]
        except (Exception, SystemExit) as error:
            return [f"its requires() failed: {type(error).__name__}: {error}"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """A plugin that could not be loaded. What it would have provided is not known."""

    provider: Provider
    error: str  # one line

    def __str__(self) -> str:
        return f"{self.provider} is installed but broken: {self.error}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocked:
    """A plugin that was not even imported, because `reason` says so."""

    provider: Provider
    reason: BlockReason

    @property
    def remedy(self) -> str:
        """What would let it in."""
        return _UNBLOCK[self.reason]

    def __str__(self) -> str:
        return f"{self.provider} is installed but blocked by {self.reason}: {self.remedy}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Conflict:
    """A name that is provided more than once, and so cannot be chosen."""

    name: str
    entries: tuple[Entry, ...]

    def __str__(self) -> str:
        kinds = " and ".join(dict.fromkeys(entry.kind for entry in self.entries))
        providers = " and by ".join(str(entry.provider) for entry in self.entries)
        return f"{kinds} '{self.name}' is provided by {providers}: {self._remedy()}"

    def _remedy(self) -> str:
        choices = [f"plugins.disabled=[{name}]" for name in self._blockable()]
        if self._is_internal:
            remedy = "block one of them with " + " or ".join(choices) if choices else ""
            return f"{remedy}{', and ' if remedy else ''}report it to the author of {self._distributions[0]}"
        return "uninstall one of the distributions, or block one with " + " or ".join(choices)

    @property
    def _distributions(self) -> list[str]:
        return list(dict.fromkeys(entry.provider.distribution for entry in self.entries))

    @property
    def _is_internal(self) -> bool:
        return len(self._distributions) == 1

    def _blockable(self) -> list[str]:
        """What can be given to plugins.disabled so that it hits one provider and not all built-in plugins."""
        entry_points = [normalise(entry.provider.entry_point) for entry in self.entries]
        names: dict[str, None] = {}
        for entry, entry_point in zip(self.entries, entry_points, strict=True):
            if not self._is_internal and not entry.provider.is_builtin:
                names[entry.provider.distribution] = None
            elif entry_points.count(entry_point) == 1:
                names[entry.provider.entry_point] = None
        return list(names)


class Catalogue:
    """What can be chosen by name, and what was left out; nothing in it changes after construction.

    Policies and schedulers share one name space. Components built for another plugin API are kept apart in
    `incompatible` and take part in no conflict.
    """

    def __init__(
        self,
        entries: Iterable[Entry] = (),
        *,
        failures: Iterable[Failure] = (),
        blocked: Iterable[Blocked] = (),
        config_paths: Iterable[tuple[Provider, str]] = (),
    ) -> None:
        ordered = sorted(entries, key=lambda entry: (entry.kind, entry.name))
        self._usable = tuple(entry for entry in ordered if entry.incompatibility is None)
        self._incompatible = tuple(entry for entry in ordered if entry.incompatibility is not None)
        self._failures = tuple(failures)
        self._blocked = tuple(blocked)
        self._config_paths = tuple(config_paths)
        self._by_name = _by_name(self._usable)

    @property
    def failures(self) -> Sequence[Failure]:
        return self._failures

    @property
    def blocked(self) -> Sequence[Blocked]:
        return self._blocked

    @property
    def incompatible(self) -> Sequence[Entry]:
        """Components built for a plugin API that this version does not serve."""
        return self._incompatible

    @property
    def conflicts(self) -> Sequence[Conflict]:
        return tuple(
            Conflict(name=name, entries=entries) for (_, name), entries in self._by_name.items() if len(entries) > 1
        )

    @property
    def config_paths(self) -> list[tuple[Provider, str]]:
        """Where plugins keep YAML files of config groups, as `pkg://PACKAGE`."""
        return list(self._config_paths)

    def entries(self) -> list[Entry]:
        """All usable components, those in conflict included, sorted by kind and name."""
        return list(self._usable)

    def names(self, kind: str) -> list[str]:
        """The names of all usable components of a kind, sorted."""
        return sorted({entry.name for entry in self._usable if entry.kind == kind})

    def get(self, kind: str, name: str) -> Entry:
        """The one component of that kind and name.

        Raises PluginConflictError when the name is provided twice and PluginError when it is unknown, built for
        another plugin API, or the name of a plugin that is broken or blocked.
        """
        return self._choose((kind,), name)

    def get_scheduler_or_policy(self, name: str) -> Entry:
        """What `scheduler=NAME` chooses; raises as `get` does."""
        return self._choose(_SHARED_NAME_SPACE, name)

    def _choose(self, kinds: tuple[str, ...], name: str) -> Entry:
        claimants = self._by_name.get((_name_space(kinds[0]), name), ())
        if len(claimants) > 1:
            raise PluginConflictError(str(Conflict(name=name, entries=claimants)))
        for entry in claimants:
            if entry.kind in kinds:
                return entry
        raise PluginError(self._why_missing(kinds, name, claimants))

    def _why_missing(self, kinds: tuple[str, ...], name: str, other_kind: Sequence[Entry]) -> str:
        for entry in self._incompatible:
            if entry.name == name and entry.kind in kinds:
                return f"{entry.kind} '{name}' of {entry.provider} cannot be used: {entry.incompatibility}"
        available = sorted({known for kind in kinds for known in self.names(kind)})
        listing = f"available: {', '.join(available)}" if available else "none is available"
        for entry in other_kind:
            return f"'{name}' is a {entry.kind}, not a {kinds[0]}; {listing}"
        for failure in self._failures:
            if failure.provider.bears(name):
                return f"{kinds[0]} '{name}' cannot be used: {failure}; repair or upgrade it; {listing}"
        for blocked in self._blocked:
            if blocked.provider.bears(name):
                return f"{kinds[0]} '{name}' cannot be used: {blocked}; {listing}"
        return (
            f"unknown {kinds[0]} '{name}'; {listing}{did_you_mean(name, available)}{self._broken_hint()}; "
            "is the plugin installed? see `tokenyard plugins`"
        )

    def _broken_hint(self) -> str:
        """A plugin's entry point need not be named like what it provides: those left out are worth a mention."""
        left_out = {
            "broken": [failure.provider for failure in self._failures],
            "blocked": [blocked.provider for blocked in self._blocked],
        }
        return "".join(
            f"; {word} plugins: " + ", ".join(f"{one.entry_point} ({one.distribution})" for one in providers)
            for word, providers in left_out.items()
            if providers
        )


def _name_space(kind: str) -> str:
    return _SHARED_NAME_SPACE[0] if kind in _SHARED_NAME_SPACE else kind


def _by_name(entries: Iterable[Entry]) -> dict[tuple[str, str], tuple[Entry, ...]]:
    table: dict[tuple[str, str], tuple[Entry, ...]] = {}
    for entry in entries:
        key = (_name_space(entry.kind), entry.name)
        table[key] = (*table.get(key, ()), entry)
    return table
