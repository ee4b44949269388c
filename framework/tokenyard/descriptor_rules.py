"""What a yielded descriptor must look like; a plugin that breaks a rule is told which."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Set

from tokenyard.catalogue import is_compatible
from tokenyard.descriptors import (
    AttentionBackendDescriptor,
    ComponentDescriptor,
    Descriptor,
    EngineCoreDescriptor,
    ExecutorDescriptor,
    KVCacheManagerDescriptor,
    ObserverDescriptor,
    PolicyDescriptor,
    SchedulerDescriptor,
)
from tokenyard.hookspecs import CONFIG_PATHS_HOOK, DESCRIPTOR_TYPES
from tokenyard.request import HINT_KEYS

_NAME = re.compile(r"[a-z0-9_-]{1,64}")
_CONFIG_PATH = re.compile(r"pkg://[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_CORE_KINDS = frozenset(
    expected.kind for expected in DESCRIPTOR_TYPES.values() if not issubclass(expected, ComponentDescriptor)
)
_WITH_FACTORY = (
    EngineCoreDescriptor,
    SchedulerDescriptor,
    PolicyDescriptor,
    KVCacheManagerDescriptor,
    AttentionBackendDescriptor,
    ExecutorDescriptor,
    ObserverDescriptor,
    ComponentDescriptor,
)


class BrokenRuleError(Exception):
    """A plugin that loads but does not keep the contract; the message names the rule."""


def check_descriptor(hook: str, item: object) -> Descriptor[object]:
    """`item`, when it is a descriptor that `hook` may yield; else BrokenRuleError.

    Of one built for another plugin API only the name and the version are looked at: it is listed, never used.
    """
    expected = DESCRIPTOR_TYPES[hook]
    if not isinstance(item, expected):
        raise BrokenRuleError(f"{hook} yielded {_a(item)}; it takes {expected.__name__} only")
    if item.kind != expected.kind:
        raise BrokenRuleError(f"{hook} yielded a descriptor of kind {item.kind!r}; it takes '{expected.kind}' only")
    where = f"{hook}, descriptor {item.name!r}"
    _check_slug(where, "name", item.name)
    _check_api_version(where, item.api_version)
    if isinstance(item, ComponentDescriptor):
        _check_component_kind(where, item.component_kind)
    if is_compatible(item.api_version):
        _check_common_fields(where, item)
        _check_own_fields(where, item)
    return item


def check_config_path(item: object) -> str:
    """`item`, when it names a package for Hydra's search path; else BrokenRuleError."""
    if isinstance(item, str) and _CONFIG_PATH.fullmatch(item):
        return item
    given = repr(item) if isinstance(item, str) else _a(item)
    raise BrokenRuleError(f"{CONFIG_PATHS_HOOK} yielded {given}; write a path such as 'pkg://my_package.configs'")


def _require(where: str, holds: bool, rule: str, given: object) -> None:
    if not holds:
        raise BrokenRuleError(f"{where}: {rule}, not {_a(given)}")


def _check_slug(where: str, field: str, value: object) -> None:
    if not isinstance(value, str):
        raise BrokenRuleError(f"{where}: {field} must be a str, not {_a(value)}")
    if not _NAME.fullmatch(value):
        raise BrokenRuleError(f"{where}: {field} {value!r} must match {_NAME.pattern}")


def _check_api_version(where: str, version: object) -> None:
    parts: tuple[object, ...] = version if isinstance(version, tuple) else ()
    if len(parts) != 2 or not all(type(part) is int and part >= 0 for part in parts):
        raise BrokenRuleError(f"{where}: api_version must be a pair of ints such as (1, 1), not {version!r}")


def _check_component_kind(where: str, kind: object) -> None:
    _check_slug(where, "component_kind", kind)
    if kind in _CORE_KINDS:
        raise BrokenRuleError(f"{where}: component_kind {kind!r} has a hook and a descriptor class of its own")


def _check_common_fields(where: str, item: Descriptor[object]) -> None:
    options_type: object = item.options_type
    is_dataclass = isinstance(options_type, type) and dataclasses.is_dataclass(options_type)
    _require(where, is_dataclass, "options_type must be a dataclass", options_type)
    _require(where, isinstance(item.summary, str), "summary must be a str", item.summary)
    _require(where, callable(item.requires), "requires must be callable", item.requires)
    devices: object = item.tested_on
    is_names = isinstance(devices, Set) and all(isinstance(device, str) for device in devices)
    _require(where, is_names, "tested_on must be a frozenset of device types", devices)


def _check_own_fields(where: str, item: Descriptor[object]) -> None:
    """What only some descriptor classes have, and `factory`, which each types for itself."""
    if isinstance(item, _WITH_FACTORY):
        _require(where, callable(item.factory), "factory must be callable", item.factory)
    if isinstance(item, AttentionBackendDescriptor):
        rank: object = item.auto_rank
        _require(where, callable(item.supports), "supports must be callable", item.supports)
        _require(where, rank is None or type(rank) is int, "auto_rank must be an int or None", rank)
    if isinstance(item, PolicyDescriptor):
        _check_metadata_type(where, item.metadata_type)
    if isinstance(item, SchedulerDescriptor):
        takes_policy: object = item.takes_policy
        _require(where, isinstance(takes_policy, bool), "takes_policy must be a bool", takes_policy)


def _check_metadata_type(where: str, metadata_type: object) -> None:
    is_dataclass = isinstance(metadata_type, type) and dataclasses.is_dataclass(metadata_type)
    _require(where, is_dataclass, "metadata_type must be a dataclass", metadata_type)
    names = {field.name for field in dataclasses.fields(metadata_type)}  # type: ignore[arg-type]  # a dataclass
    if taken := sorted(names & {*HINT_KEYS}):
        raise BrokenRuleError(f"{where}: metadata_type has a field '{taken[0]}', which is a hint for every policy")


def _a(value: object) -> str:
    if value is None:
        return "None"
    return f"the class {value.__name__}" if isinstance(value, type) else f"a value of type {type(value).__name__}"
