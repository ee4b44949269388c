"""A whole config as plain data into EngineConfig, once, at launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from tokenyard.config import (
    AttentionConfig,
    EngineConfig,
    ExecutorConfig,
    KVCacheConfig,
    LogitsProcessorConfig,
    LoopConfig,
    ModelConfig,
    ObserverConfig,
    PluginsConfig,
    PolicyConfig,
    SchedulerConfig,
    ServerConfig,
)
from tokenyard.interfaces.logits_processor import COMPONENT_KIND
from tokenyard.launch.checks import check_config, refuse_targets
from tokenyard.launch.convert import construct, convert, convert_fields, to_dataclass, wrong
from tokenyard.launch.reserved import ONLY_VALUES, PLANNED_KEYS, refuse_group, refuse_value
from tokenyard.launch.schema import (
    GROUPS,
    TOP_KEYS,
    Chosen,
    core_fields,
    field_names,
    find_chosen,
    group_values,
    unknown_key,
)

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue

GroupT = TypeVar("GroupT")


def build_engine_config(values: Mapping[str, object], catalogue: Catalogue) -> EngineConfig:
    """Convert and check a config. What is left out has its default; components are looked up in the catalogue.

    Raises ConfigError on an unknown key, a wrong type or range, a missing value and a feature that does not exist yet,
    PluginError on a component that cannot be used.
    """
    refuse_targets(values, "")
    _refuse_reserved(values)
    chosen = find_chosen(values, catalogue)
    values = _settle_planned(values, chosen)
    _refuse_unknown_keys(values, chosen)
    config = EngineConfig(
        engine=_component(LoopConfig, "engine", values, chosen),
        scheduler=_scheduler(values, chosen),
        kv_cache=_component(KVCacheConfig, "kv_cache", values, chosen),
        attention=_component(AttentionConfig, "attention", values, chosen),
        executor=_component(ExecutorConfig, "executor", values, chosen),
        model=to_dataclass(ModelConfig, group_values(values, "model"), "model"),
        plugins=build_plugins_config(group_values(values, "plugins")),
        server=to_dataclass(ServerConfig, group_values(values, "server"), "server"),
        observers=_listed(ObserverConfig, "observers", "observer", values, catalogue),
        logits_processors=_listed(LogitsProcessorConfig, "logits_processors", COMPONENT_KIND, values, catalogue),
        seed=cast("int", convert(values.get("seed", EngineConfig().seed), int, "seed")),
    )
    check_config(config)
    return config


def build_plugins_config(values: Mapping[str, object]) -> PluginsConfig:
    """Group `plugins` alone, which is needed before any plugin is loaded."""
    return to_dataclass(PluginsConfig, values, "plugins")


def _refuse_reserved(values: Mapping[str, object]) -> None:
    for key in values:
        refuse_group(str(key))
    for key in ONLY_VALUES:
        group, _, name = key.partition(".")
        node = group_values(values, group)
        if name in node:
            refuse_value(key, node[name])


def _settle_planned(values: Mapping[str, object], chosen: Chosen) -> dict[str, object]:
    """Refuse planned keys, or drop them when they say what happens anyway; a component may have such an option."""
    kept = dict(values)
    for key in PLANNED_KEYS:
        group, _, name = key.partition(".")
        node = dict(group_values(values, group))
        if name in node and name not in field_names(chosen.options_type(group)):
            refuse_value(key, node.pop(name))
            kept[group] = node
    return kept


def _refuse_unknown_keys(values: Mapping[str, object], chosen: Chosen) -> None:
    known = list(dict.fromkeys(chosen.keys()))
    for key in values:
        if key not in TOP_KEYS:
            raise unknown_key(str(key), TOP_KEYS if "." in str(key) else [*TOP_KEYS, *known])
    for group in GROUPS:
        for name in group_values(values, group):
            if name != "policy" and f"{group}.{name}" not in known:
                raise unknown_key(f"{group}.{name}", known)
    if chosen.policy is not None:
        for name in group_values(group_values(values, "scheduler"), "policy"):
            if f"scheduler.policy.{name}" not in known:
                raise unknown_key(f"scheduler.policy.{name}", known)


def _component(
    config_type: type[GroupT], group: str, values: Mapping[str, object], chosen: Chosen, **more: object
) -> GroupT:
    """The dataclass of a component group: the core's own keys, and the options of the component it names."""
    data = group_values(values, group)
    core = {name: data[name] for name in core_fields(config_type) if name in data}
    options_type = chosen.options_type(group)
    options = {name: data[name] for name in field_names(options_type) if name in data}
    return construct(
        config_type,
        {
            **convert_fields(config_type, core, group),
            **more,
            "options": to_dataclass(options_type, options, group),
        },
        group,
    )


def _scheduler(values: Mapping[str, object], chosen: Chosen) -> SchedulerConfig:
    policy: PolicyConfig | None = None
    if chosen.policy is not None:
        data = dict(group_values(group_values(values, "scheduler"), "policy"))
        data.pop("name", None)
        options: object = to_dataclass(chosen.policy_options_type, data, "scheduler.policy")
        policy = PolicyConfig(name=chosen.policy.descriptor.name, options=options)
    return _component(SchedulerConfig, "scheduler", values, chosen, policy=policy)


def _listed(
    config_type: Callable[..., GroupT], key: str, kind: str, values: Mapping[str, object], catalogue: Catalogue
) -> tuple[GroupT, ...]:
    """The components of a list of names, or of mappings with a name and options."""
    rows = values.get(key)
    if rows is None:
        return ()
    if isinstance(rows, str) or not isinstance(rows, list | tuple):
        raise wrong(key, rows, "a list of names, or of mappings with a name and options")
    return tuple(config_type(**_named(item, f"{key}[{index}]", kind, catalogue)) for index, item in enumerate(rows))


def _named(item: object, key: str, kind: str, catalogue: Catalogue) -> dict[str, object]:
    data = {"name": item} if isinstance(item, str) else item
    if not isinstance(data, Mapping) or not isinstance(data.get("name"), str):
        raise wrong(key, item, "a name, or a mapping with a name and options: {name: NAME, OPTION: VALUE}")
    entry = catalogue.get(kind, data["name"])
    options = {name: value for name, value in data.items() if name != "name"}
    return {"name": entry.name, "options": to_dataclass(entry.descriptor.options_type, options, key)}
