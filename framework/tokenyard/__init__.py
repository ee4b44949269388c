"""Tokenyard: an LLM inference engine whose parts can be swapped.

Importing this package imports no torch: names are loaded when they are first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.lazy_names import load_name
from tokenyard.paths import expose_configs

if TYPE_CHECKING:
    from tokenyard.async_llm import AsyncLLM
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
    from tokenyard.experiments.simulate import SimulationResult, simulate
    from tokenyard.hookspecs import hookimpl
    from tokenyard.llm import LLM
    from tokenyard.outputs import CompletionOutput, Logprob, RequestOutput
    from tokenyard.request import SchedulingHints
    from tokenyard.sampling_params import RequestOutputKind, SamplingParams
    from tokenyard.server import serve

_HOME = {
    "AsyncLLM": "tokenyard.async_llm",
    "AttentionBackendDescriptor": "tokenyard.descriptors",
    "CompletionOutput": "tokenyard.outputs",
    "ComponentDescriptor": "tokenyard.descriptors",
    "EngineConfig": "tokenyard.config",
    "EngineCoreDescriptor": "tokenyard.descriptors",
    "ExecutorDescriptor": "tokenyard.descriptors",
    "KVCacheManagerDescriptor": "tokenyard.descriptors",
    "LLM": "tokenyard.llm",
    "Logprob": "tokenyard.outputs",
    "ObserverDescriptor": "tokenyard.descriptors",
    "PLUGIN_API": "tokenyard.descriptors",
    "PolicyDescriptor": "tokenyard.descriptors",
    "RequestOutput": "tokenyard.outputs",
    "RequestOutputKind": "tokenyard.sampling_params",
    "SamplingParams": "tokenyard.sampling_params",
    "SchedulerDescriptor": "tokenyard.descriptors",
    "SchedulingHints": "tokenyard.request",
    "SimulationResult": "tokenyard.experiments.simulate",
    "hookimpl": "tokenyard.hookspecs",
    "serve": "tokenyard.server",
    "simulate": "tokenyard.experiments.simulate",
}

__version__ = "0.1.0"

__all__ = [
    "LLM",
    "PLUGIN_API",
    "AsyncLLM",
    "AttentionBackendDescriptor",
    "CompletionOutput",
    "ComponentDescriptor",
    "EngineConfig",
    "EngineCoreDescriptor",
    "ExecutorDescriptor",
    "KVCacheManagerDescriptor",
    "Logprob",
    "ObserverDescriptor",
    "PolicyDescriptor",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "SchedulerDescriptor",
    "SchedulingHints",
    "SimulationResult",
    "hookimpl",
    "serve",
    "simulate",
]

expose_configs()


def __getattr__(name: str) -> object:
    return load_name(__name__, _HOME, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
