"""What of an EngineConfig a worker reads, as the plain values that `tokenyard.launch.build` makes typed again.

Left out is what works in the engine's process alone, such as the scheduler's policy: workers need not have it.
"""

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
        SchedulerConfig,
    )

_OF_ENGINE = ("name", "options", "policy")


def worker_values(config: EngineConfig) -> dict[str, object]:
    """By group and key; raises TypeError for an option that does not travel between processes."""
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


def _component(config: AttentionConfig | ExecutorConfig | LogitsProcessorConfig) -> dict[str, object]:
    """A component's options stand among the keys of its group."""
    values = dataclass_values(config)
    del values["options"]
    return {**values, **dataclass_values(config.options)}


def _limits(config: SchedulerConfig | KVCacheConfig) -> dict[str, object]:
    return {name: value for name, value in dataclass_values(config).items() if name not in _OF_ENGINE}
