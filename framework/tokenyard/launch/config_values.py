"""An EngineConfig as the plain data that `build_engine_config` makes it of: what one process sends another."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.ipc.plain import dataclass_values

if TYPE_CHECKING:
    from tokenyard.config import (
        AttentionConfig,
        EngineConfig,
        ExecutorConfig,
        KVCacheConfig,
        LogitsProcessorConfig,
        LoopConfig,
        ObserverConfig,
        PolicyConfig,
        SchedulerConfig,
    )


def config_to_values(config: EngineConfig) -> dict[str, object]:
    """Every value, defaults included: what this process settled holds in the other one too.

    Raises TypeError for an option that cannot be said in plain data.
    """
    return {
        "engine": _component(config.engine),
        "scheduler": _scheduler(config.scheduler),
        "kv_cache": _component(config.kv_cache),
        "attention": _component(config.attention),
        "executor": _component(config.executor),
        "model": dataclass_values(config.model),
        "plugins": dataclass_values(config.plugins),
        "server": dataclass_values(config.server),
        "observers": [_component(row) for row in config.observers],
        "logits_processors": [_component(row) for row in config.logits_processors],
        "seed": config.seed,
    }


def _component(
    config: LoopConfig
    | KVCacheConfig
    | AttentionConfig
    | ExecutorConfig
    | PolicyConfig
    | ObserverConfig
    | LogitsProcessorConfig
    | SchedulerConfig,
) -> dict[str, object]:
    """A component's options stand among the keys of its group."""
    values = dataclass_values(config)
    del values["options"]
    return {**values, **dataclass_values(config.options)}


def _scheduler(config: SchedulerConfig) -> dict[str, object]:
    values = _component(config)
    del values["policy"]
    return values if config.policy is None else {**values, "policy": _component(config.policy)}
