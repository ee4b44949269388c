"""The contracts between the parts of the engine, one abstract class a file. Importing them imports no torch."""

from tokenyard.interfaces.attention import (
    AttentionBackend,
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    AttentionSpec,
    KVCacheLayout,
)
from tokenyard.interfaces.engine_core import EngineCore, EngineCoreContext
from tokenyard.interfaces.executor import (
    Executor,
    ExecutorContext,
    GrammarOutput,
    KVCacheGroupSpec,
    KVCachePlan,
    StepFuture,
    WorkerReport,
)
from tokenyard.interfaces.kv_cache import (
    Allocation,
    Hit,
    KVCacheManager,
    KVCacheManagerContext,
    KVCacheUsage,
    KVRequest,
)
from tokenyard.interfaces.observer import Observer, ObserverContext
from tokenyard.interfaces.policy import (
    AdmitDecision,
    PolicyContext,
    Preemption,
    PreemptMode,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    StepOutcome,
)
from tokenyard.interfaces.scheduler import Scheduler, SchedulerContext

__all__ = [
    "AdmitDecision",
    "Allocation",
    "AttentionBackend",
    "AttentionBackendContext",
    "AttentionBatch",
    "AttentionLayer",
    "AttentionSpec",
    "EngineCore",
    "EngineCoreContext",
    "Executor",
    "ExecutorContext",
    "GrammarOutput",
    "Hit",
    "KVCacheGroupSpec",
    "KVCacheLayout",
    "KVCacheManager",
    "KVCacheManagerContext",
    "KVCachePlan",
    "KVCacheUsage",
    "KVRequest",
    "Observer",
    "ObserverContext",
    "PolicyContext",
    "PreemptMode",
    "Preemption",
    "RequestView",
    "Scheduler",
    "SchedulerContext",
    "SchedulerView",
    "SchedulingPolicy",
    "StepFuture",
    "StepOutcome",
    "WorkerReport",
]
