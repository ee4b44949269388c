"""What plugin authors test with: the engine step by step, and suites that say whether a part keeps its contract.

Importing this package imports neither torch nor Hydra, pytest or hypothesis: names are loaded when they are first used.
The suites need the extra `testing`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard.lazy_names import load_name

if TYPE_CHECKING:
    from tokenyard.testing.contracts.attention import AttentionBackendContract
    from tokenyard.testing.contracts.engine_core import EngineCoreContract
    from tokenyard.testing.contracts.eviction import EvictionContract
    from tokenyard.testing.contracts.executor import ExecutorContract
    from tokenyard.testing.contracts.kv_cache import KVCacheManagerContract
    from tokenyard.testing.contracts.latency import LatencyModelContract
    from tokenyard.testing.contracts.logits_processor import LogitsProcessorContract
    from tokenyard.testing.contracts.observer import ObserverContract
    from tokenyard.testing.contracts.policy import PolicyContract
    from tokenyard.testing.contracts.predictor import PredictorContract
    from tokenyard.testing.contracts.scheduler import SchedulerContract
    from tokenyard.testing.contracts.workload import WorkloadContract
    from tokenyard.testing.errors import ContractViolation, MissingExtraError
    from tokenyard.testing.harness import EngineHarness
    from tokenyard.testing.parts import catalogue_with
    from tokenyard.testing.records import RequestRecord
    from tokenyard.testing.scripted import ScriptedExecutor

_HOME = {
    "AttentionBackendContract": "tokenyard.testing.contracts.attention",
    "ContractViolation": "tokenyard.testing.errors",
    "EngineCoreContract": "tokenyard.testing.contracts.engine_core",
    "EngineHarness": "tokenyard.testing.harness",
    "EvictionContract": "tokenyard.testing.contracts.eviction",
    "ExecutorContract": "tokenyard.testing.contracts.executor",
    "KVCacheManagerContract": "tokenyard.testing.contracts.kv_cache",
    "LatencyModelContract": "tokenyard.testing.contracts.latency",
    "LogitsProcessorContract": "tokenyard.testing.contracts.logits_processor",
    "MissingExtraError": "tokenyard.testing.errors",
    "ObserverContract": "tokenyard.testing.contracts.observer",
    "PolicyContract": "tokenyard.testing.contracts.policy",
    "PredictorContract": "tokenyard.testing.contracts.predictor",
    "RequestRecord": "tokenyard.testing.records",
    "SchedulerContract": "tokenyard.testing.contracts.scheduler",
    "ScriptedExecutor": "tokenyard.testing.scripted",
    "WorkloadContract": "tokenyard.testing.contracts.workload",
    "catalogue_with": "tokenyard.testing.parts",
}

__all__ = [
    "AttentionBackendContract",
    "ContractViolation",
    "EngineCoreContract",
    "EngineHarness",
    "EvictionContract",
    "ExecutorContract",
    "KVCacheManagerContract",
    "LatencyModelContract",
    "LogitsProcessorContract",
    "MissingExtraError",
    "ObserverContract",
    "PolicyContract",
    "PredictorContract",
    "RequestRecord",
    "SchedulerContract",
    "ScriptedExecutor",
    "WorkloadContract",
    "catalogue_with",
]


def __getattr__(name: str) -> object:
    return load_name(__name__, _HOME, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
