"""Tokenyard: an LLM inference engine whose parts can be swapped.

Importing this package imports no torch: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from tokenyard.paths import expose_configs

if TYPE_CHECKING:
    from tokenyard.config import EngineConfig
    from tokenyard.descriptors import (
        PLUGIN_API,
        AttentionBackendDescriptor,
        ComponentDescriptor,
        EngineCoreDescriptor,
        ExecutorDescriptor,
        KVCacheManagerDescriptor,
        ObserverDescriptor,
        PolicyDescriptor,
        SchedulerDescriptor,
    )
    from tokenyard.hookspecs import hookimpl
    from tokenyard.llm import LLM
    from tokenyard.outputs import CompletionOutput, RequestOutput
    from tokenyard.sampling_params import SamplingParams

_HOME = {
    "AttentionBackendDescriptor": "tokenyard.descriptors",
    "CompletionOutput": "tokenyard.outputs",
    "ComponentDescriptor": "tokenyard.descriptors",
    "EngineConfig": "tokenyard.config",
    "EngineCoreDescriptor": "tokenyard.descriptors",
    "ExecutorDescriptor": "tokenyard.descriptors",
    "KVCacheManagerDescriptor": "tokenyard.descriptors",
    "LLM": "tokenyard.llm",
    "ObserverDescriptor": "tokenyard.descriptors",
    "PLUGIN_API": "tokenyard.descriptors",
    "PolicyDescriptor": "tokenyard.descriptors",
    "RequestOutput": "tokenyard.outputs",
    "SamplingParams": "tokenyard.sampling_params",
    "SchedulerDescriptor": "tokenyard.descriptors",
    "hookimpl": "tokenyard.hookspecs",
}

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "PLUGIN_API",
    "AttentionBackendDescriptor",
    "CompletionOutput",
    "ComponentDescriptor",
    "EngineConfig",
    "EngineCoreDescriptor",
    "ExecutorDescriptor",
    "KVCacheManagerDescriptor",
    "ObserverDescriptor",
    "PolicyDescriptor",
    "RequestOutput",
    "SamplingParams",
    "SchedulerDescriptor",
    "hookimpl",
]

expose_configs()


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'tokenyard' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
