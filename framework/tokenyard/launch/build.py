"""A whole config as plain data into EngineConfig, once, at launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar, cast

from tokenyard.config import (
    AttentionConfig,
    EngineConfig,
    ExecutorConfig,
    ExperimentConfig,
    KVCacheConfig,
    LatencyConfig,
    LogitsProcessorConfig,
    LoopConfig,
    ModelConfig,
    ObserverConfig,
    PluginsConfig,
    PolicyConfig,
    SchedulerConfig,
    ServerConfig,
    TraceConfig,
    WorkloadConfig,
)
from tokenyard.errors import ConfigError
from tokenyard.interfaces.logits_processor import COMPONENT_KIND
from tokenyard.launch.checks import check_config, refuse_targets
from tokenyard.launch.convert import construct, convert, convert_fields, to_dataclass, wrong
from tokenyard.launch.named import component_keys, named_component
from tokenyard.launch.reserved import ONLY_VALUES, refuse_group, refuse_value
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
    _refuse_unknown_keys(values, chosen)
    config = EngineConfig(
        engine=_component(LoopConfig, "engine", values, chosen),
        scheduler=_scheduler(values, chosen, catalogue),
        kv_cache=_component(
            KVCacheConfig, "kv_cache", values, chosen, **component_keys(KVCacheConfig, "kv_cache", values, catalogue)
        ),
        attention=_component(AttentionConfig, "attention", values, chosen),
        executor=_component(ExecutorConfig, "executor", values, chosen),
        model=to_dataclass(ModelConfig, group_values(values, "model"), "model"),
        plugins=build_plugins_config(group_values(values, "plugins")),
        server=to_dataclass(ServerConfig, group_values(values, "server"), "server"),
        latency=_component(LatencyConfig, "latency", values, chosen),
        trace=to_dataclass(TraceConfig, group_values(values, "trace"), "trace"),
        workload=_component(WorkloadConfig, "workload", values, chosen),
        experiment=to_dataclass(ExperimentConfig, group_values(values, "experiment"), "experiment"),
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
    core = {name: data[name] for name in core_fields(config_type) if name in data and name not in more}
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


def _scheduler(values: Mapping[str, object], chosen: Chosen, catalogue: Catalogue) -> SchedulerConfig:
    policy: PolicyConfig | None = None
    if chosen.policy is not None:
        data = dict(group_values(group_values(values, "scheduler"), "policy"))
        data.pop("name", None)
        options: object = to_dataclass(chosen.policy_options_type, data, "scheduler.policy")
        policy = PolicyConfig(name=chosen.policy.descriptor.name, options=options)
    named = component_keys(SchedulerConfig, "scheduler", values, catalogue)
    if policy is None and named["shadow"] is not None:
        raise ConfigError(
            f"scheduler.shadow={named['shadow']}: scheduler '{group_values(values, 'scheduler').get('name')}' takes no "
            "policy, so none can shadow it; remove it, or choose a policy with scheduler=NAME"
        )
    return _component(SchedulerConfig, "scheduler", values, chosen, policy=policy, **named)


def _listed(
    config_type: Callable[..., GroupT], key: str, kind: str, values: Mapping[str, object], catalogue: Catalogue
) -> tuple[GroupT, ...]:
    """The components of a list of names, or of mappings with a name and options."""
    rows = values.get(key)
    if rows is None:
        return ()
    if isinstance(rows, str) or not isinstance(rows, list | tuple):
        raise wrong(key, rows, "a list of names, or of mappings with a name and options")
    named = [named_component(item, f"{key}[{index}]", kind, catalogue) for index, item in enumerate(rows)]
    return tuple(config_type(name=name, options=options) for name, options in named)
