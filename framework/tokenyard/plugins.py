"""Finding and loading plugins: at launch, in every process for itself, each plugin at most once.

Each plugin is imported and asked on its own, in a plugin manager of its own: what goes wrong is that plugin's and
nothing of it stays. It is kept with its error, warned about once, and fatal only when the config names it or
`plugins.strict` is set.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata

import pluggy

from tokenyard.catalogue import (
    DISABLED_VARIABLE,
    Blocked,
    BlockReason,
    Catalogue,
    Entry,
    Failure,
    Provider,
    normalise,
)
from tokenyard.config import PluginsConfig
from tokenyard.descriptor_rules import BrokenRuleError, check_config_path, check_descriptor
from tokenyard.descriptors import PLUGIN_API, Descriptor
from tokenyard.errors import PluginError, did_you_mean
from tokenyard.hookspecs import CONFIG_PATHS_HOOK, HOOK_NAMES, TokenyardHooks

logger = logging.getLogger(__name__)

ENTRY_POINT_GROUP = "tokenyard"

_MAX_ERROR_LENGTH = 400  # characters of a third party's message that are worth a place on one line


def load_catalogue(config: PluginsConfig | None = None) -> Catalogue:
    """Everything that the installed and permitted plugins provide; None = the default PluginsConfig.

    Cached for the process and these settings. Raises PluginError when the installed distributions cannot be listed
    (not cached: the next call tries again), when `allow` or `disabled` name something that is not installed, and,
    with `strict`, when any plugin is broken, in conflict or of another API version.
    """
    return _loader.catalogue(config or PluginsConfig())


def forget_plugins() -> None:
    """Drop what this process has loaded, so that the next `load_catalogue` looks again. For tests."""
    _loader.forget()


@dataclass(frozen=True, slots=True)
class _Installed:
    provider: Provider
    entry_point: metadata.EntryPoint


@dataclass(frozen=True, slots=True)
class _Loaded:
    """What one plugin provides, checked."""

    entries: tuple[Entry, ...]
    config_paths: tuple[str, ...]


_CacheKey = tuple[tuple[str, ...] | None, tuple[str, ...], bool, str]


class _Loader:
    """One process's plugins. `forget` also runs in a forked child: it loads for itself, as a spawned one does."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._lock = threading.RLock()  # a new one: in a forked child the old one may be held by nobody that lives
        self._is_loading = False
        self._catalogues: dict[_CacheKey, Catalogue] = {}
        self._outcomes: dict[tuple[Provider, str], _Loaded | Failure] = {}
        self._warned: set[str] = set()

    def catalogue(self, config: PluginsConfig) -> Catalogue:
        variable = os.environ.get(DISABLED_VARIABLE, "")
        allow = None if config.allow is None else tuple(config.allow)
        key = (allow, tuple(config.disabled), config.strict, variable)
        with self._lock:
            if key not in self._catalogues:
                if self._is_loading:
                    raise PluginError("a plugin asked for the catalogue while it was being loaded; ask in its factory")
                self._is_loading = True
                try:
                    self._catalogues[key] = self._build(config, _names_in(variable))
                finally:
                    self._is_loading = False
            return self._catalogues[key]

    def _build(self, config: PluginsConfig, disabled_by_variable: Sequence[str]) -> Catalogue:
        installed = _installed_plugins()
        gate = _Gate(config, disabled_by_variable)
        gate.check_names([plugin.provider for plugin in installed], self._warn_once)
        entries: list[Entry] = []
        failures: list[Failure] = []
        blocked: list[Blocked] = []
        config_paths: list[tuple[Provider, str]] = []
        for plugin in installed:
            if reason := gate.reason(plugin.provider):
                blocked.append(Blocked(provider=plugin.provider, reason=reason))
                continue
            outcome = self._outcome(plugin)
            if isinstance(outcome, Failure):
                failures.append(outcome)
                continue
            entries.extend(outcome.entries)
            config_paths.extend((plugin.provider, path) for path in outcome.config_paths)
        catalogue = Catalogue(entries, failures=failures, blocked=blocked, config_paths=config_paths)
        self._report(catalogue, strict=config.strict)
        return catalogue

    def _outcome(self, plugin: _Installed) -> _Loaded | Failure:
        """Load one plugin, or recall what came of it; failures stay, so that a broken module runs once."""
        key = (plugin.provider, plugin.entry_point.value)
        if key not in self._outcomes:
            self._outcomes[key] = _load_plugin(plugin)
        return self._outcomes[key]

    def _report(self, catalogue: Catalogue, *, strict: bool) -> None:
        problems = [str(failure) for failure in catalogue.failures]
        problems += [str(conflict) for conflict in catalogue.conflicts]
        problems += [
            f"{entry.kind} '{entry.name}' of {entry.provider} cannot be used: {entry.incompatibility}"
            for entry in catalogue.incompatible
        ]
        if strict and problems:
            raise PluginError(f"plugins.strict=true, and {'; '.join(problems)}")
        for problem in problems:
            self._warn_once(problem)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning("%s", message)


class _Gate:
    """Which plugins may be imported; being disabled wins over being allowed.

    The built-in distribution needs no allowing, because an engine without any part cannot run: `allow=[]` means no
    third-party code, not no engine. Its plugins can be disabled by name like any other.
    """

    def __init__(self, config: PluginsConfig, disabled_by_variable: Sequence[str]) -> None:
        self._config = config
        self._variable = disabled_by_variable
        self._allow = None if config.allow is None else _normalised(config.allow)
        self._disabled = _normalised(config.disabled)
        self._disabled_by_variable = _normalised(disabled_by_variable)

    def reason(self, provider: Provider) -> BlockReason | None:
        """Why a plugin must not be imported; None = it may."""
        names = _normalised((provider.entry_point, provider.distribution))
        if names & self._disabled_by_variable:
            return "TOKENYARD_PLUGINS_DISABLED"
        if names & self._disabled:
            return "plugins.disabled"
        if self._allow is not None and not provider.is_builtin and not names & self._allow:
            return "plugins.allow"
        return None

    def check_names(self, providers: Iterable[Provider], warn: Callable[[str], None]) -> None:
        """Refuse settings that name what is not installed; the environment variable only warns.

        It is set for many programs and machines at once, where not every plugin is installed.
        """
        known = sorted({name for plugin in providers for name in (plugin.entry_point, plugin.distribution)})
        for key, names in (("plugins.allow", self._config.allow or ()), ("plugins.disabled", self._config.disabled)):
            if problem := _unknown_names(key, names, known):
                raise PluginError(problem)
        if problem := _unknown_names(DISABLED_VARIABLE, self._variable, known):
            warn(problem)


def _normalised(names: Iterable[str]) -> frozenset[str]:
    return frozenset(normalise(name) for name in names)


def _names_in(variable: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in variable.split(",") if name.strip())


def _unknown_names(key: str, names: Iterable[str], known: Sequence[str]) -> str | None:
    installed = _normalised(known)
    unknown = [name for name in names if normalise(name) not in installed]
    if not unknown:
        return None
    given = ", ".join(f"'{name}'" for name in unknown)
    return (
        f"{key} names {given}, which is no installed plugin or distribution{did_you_mean(unknown[0], known)}; "
        f"installed: {', '.join(known)}"
    )


def _installed_plugins() -> list[_Installed]:
    """All entry points of the group, sorted; of two copies of a distribution, only the one that imports would find."""
    try:
        found = [_Installed(_provider(point), point) for point in metadata.entry_points(group=ENTRY_POINT_GROUP)]
    except Exception as error:
        raise PluginError(
            f"the installed plugins cannot be listed: {_error_line(error)}; look for a damaged "
            "*.dist-info folder in this Python environment"
        ) from error
    return sorted(
        found,
        key=lambda plugin: (
            normalise(plugin.provider.distribution),
            plugin.provider.entry_point,
            plugin.entry_point.value,
        ),
    )


def _provider(point: metadata.EntryPoint) -> Provider:
    """Who an entry point belongs to; a half-removed distribution has no metadata to tell."""
    name: str | None = None
    version: str | None = None
    try:
        if point.dist is not None:
            name, version = point.dist.name, point.dist.version
    except Exception as error:
        logger.debug("no metadata for entry point %s: %s", point.name, error)
    return Provider(
        distribution=name or "(unknown distribution)",
        version=version or "(unknown version)",
        entry_point=point.name,
    )


def _load_plugin(plugin: _Installed) -> _Loaded | Failure:
    """Import a plugin and ask its hooks; whole or not at all. Only KeyboardInterrupt passes through."""
    try:
        return _collect(plugin.provider, plugin.entry_point.load())
    except BrokenRuleError as error:
        problem = str(error)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # sys.exit() in a module, or a panic of a library that is no Exception
        problem = _error_line(error)
        logger.debug("traceback of %s", plugin.provider, exc_info=error)
    return Failure(provider=plugin.provider, error=problem)


def _collect(provider: Provider, plugin: object) -> _Loaded:
    entries: list[Entry] = []
    config_paths: list[str] = []
    for hook, function in _hook_functions(plugin):
        for item in _items(hook, function()):
            if hook == CONFIG_PATHS_HOOK:
                config_paths.append(check_config_path(item))
            else:
                entries.append(Entry(descriptor=check_descriptor(hook, item), provider=provider))
    return _Loaded(tuple(entries), tuple(config_paths))


def _hook_functions(plugin: object) -> list[tuple[str, Callable[..., object]]]:
    """The plugin's marked functions by hook, registered in a manager that holds nothing else."""
    manager = pluggy.PluginManager("tokenyard")
    manager.add_hookspecs(TokenyardHooks)
    manager.register(plugin)
    functions: list[tuple[str, Callable[..., object]]] = []
    for caller in manager.get_hookcallers(plugin) or ():
        for implementation in caller.get_hookimpls():
            if implementation.wrapper or implementation.hookwrapper:
                raise BrokenRuleError(f"hook '{caller.name}' is a wrapper; plugins cannot wrap each other's hooks")
            if caller.has_spec():
                functions.append((caller.name, implementation.function))
            elif not implementation.optionalhook:
                raise BrokenRuleError(f"unknown hook '{caller.name}'{did_you_mean(caller.name, HOOK_NAMES)}")
    _check_marks(plugin, {name for name, _ in functions})
    return sorted(functions, key=lambda pair: pair[0])


def _check_marks(plugin: object, marked: set[str]) -> None:
    """A hook function without its decorator would be passed over in silence."""
    for name in HOOK_NAMES:
        if name not in marked and callable(getattr(plugin, name, None)):
            raise BrokenRuleError(f"function '{name}' lacks the decorator @tokenyard.hookimpl")
    if not marked:
        raise BrokenRuleError(
            f"it has no hook; an entry point names a module with functions marked @tokenyard.hookimpl, "
            f"one or more of {', '.join(HOOK_NAMES)}"
        )


def _items(hook: str, result: object) -> Iterable[object]:
    if isinstance(result, Iterable) and not isinstance(result, str | bytes | Descriptor):
        return result
    raise BrokenRuleError(
        f"{hook} returned {'None' if result is None else 'one ' + type(result).__name__}; "
        "return a list, or write a generator"
    )


def _error_line(error: BaseException) -> str:
    """One line of an exception, and of the one at the root of it."""
    root, seen = error, {id(error)}
    while (cause := root.__cause__ or root.__context__) is not None and id(cause) not in seen:
        root = cause
        seen.add(id(cause))
    line = _describe(error) if root is error else f"{_describe(error)} (caused by {_describe(root)})"
    if isinstance(error, TypeError) and "unexpected keyword argument" in line:
        line += f" (this Tokenyard has plugin API {PLUGIN_API[0]}.{PLUGIN_API[1]}; a newer one may know it)"
    return line


def _describe(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if len(text) > _MAX_ERROR_LENGTH:
        text = text[:_MAX_ERROR_LENGTH] + "..."
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


_loader = _Loader()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_loader.forget)
