"""An EngineConfig as the plain data that `tokenyard.launch.build` makes typed again: what one process sends another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.ipc.plain import dataclass_values

if TYPE_CHECKING:
    from tokenyard.config import (
        AttentionConfig,
        EngineConfig,
        ExecutorConfig,
        KVCacheConfig,
        LatencyConfig,
        LogitsProcessorConfig,
        LoopConfig,
        ObserverConfig,
        PolicyConfig,
        SchedulerConfig,
        WorkloadConfig,
    )

_OF_ENGINE = ("name", "options", "policy")
_NAMED = ("predictor", "shadow", "eviction")  # keys beside which a component's options stand, as `KEY_options`


def config_to_values(config: EngineConfig) -> dict[str, object]:
    """Every value, defaults included: what this process settled holds in the other one too.

    Raises TypeError for an option that cannot be said in plain data.
    """
    return {
        **worker_values(config),
        "engine": _component(config.engine),
        "scheduler": _scheduler(config.scheduler),
        "kv_cache": _component(config.kv_cache),
        "server": dataclass_values(config.server),
        "latency": _component(config.latency),
        "trace": dataclass_values(config.trace),
        "workload": _component(config.workload),
        "experiment": dataclass_values(config.experiment),
        "observers": [_component(row) for row in config.observers],
    }


def worker_values(config: EngineConfig) -> dict[str, object]:
    """What a worker reads of it, by group and key; raises TypeError as `config_to_values`.

    Left out is what works in the engine's process alone, such as the scheduler's policy: workers need not have it.
    """
    return {
        "model": dataclass_values(config.model),
        "plugins": dataclass_values(config.plugins),
        "attention": _component(config.attention),
        "executor": _component(config.executor),
        "logits_processors": [_component(row) for row in config.logits_processors],
        "scheduler": _limits(config.scheduler),
        "kv_cache": _limits(config.kv_cache),
        "seed": config.seed,
    }


def _component(
    config: LoopConfig
    | KVCacheConfig
    | LatencyConfig
    | AttentionConfig
    | ExecutorConfig
    | PolicyConfig
    | ObserverConfig
    | LogitsProcessorConfig
    | SchedulerConfig
    | WorkloadConfig,
) -> dict[str, object]:
    """A component's options stand among the keys of its group."""
    values = _with_named(dataclass_values(config))
    del values["options"]
    return {**values, **dataclass_values(config.options)}


def _with_named(values: dict[str, object]) -> dict[str, object]:
    """Components that a key of the group names, as a config says them: {name: NAME, OPTION: VALUE}."""
    for key in _NAMED:
        options = values.pop(f"{key}_options", None)
        if isinstance(options, dict) and options:
            values[key] = {"name": values[key], **options}
    return values


def _scheduler(config: SchedulerConfig) -> dict[str, object]:
    values = _component(config)
    del values["policy"]
    return values if config.policy is None else {**values, "policy": _component(config.policy)}


def _limits(config: SchedulerConfig | KVCacheConfig) -> dict[str, object]:
    left_out = {*_OF_ENGINE, *_NAMED, *(f"{key}_options" for key in _NAMED)}
    return {name: value for name, value in dataclass_values(config).items() if name not in left_out}
