"""The contracts between the parts of the engine, one abstract class a file. Importing them imports no torch."""

from tokenyard.interfaces.alone import service_alone
from tokenyard.interfaces.attention import (
    AttentionBackend,
    AttentionBackendContext,
    AttentionBatch,
    AttentionLayer,
    AttentionSpec,
    KVCacheLayout,
)
from tokenyard.interfaces.client_counters import ClientCounters
from tokenyard.interfaces.columns import RequestColumns
from tokenyard.interfaces.engine_core import EngineCore, EngineCoreContext, PauseMode
from tokenyard.interfaces.eviction import EvictionContext, EvictionRule
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
    ExtraKey,
    Hit,
    KVCacheInspection,
    KVCacheManager,
    KVCacheManagerContext,
    KVCacheUsage,
    KVRequest,
)
from tokenyard.interfaces.latency import LatencyModel, LatencyModelContext, StepLatency, StepLoad
from tokenyard.interfaces.logits_processor import (
    LogitsProcessor,
    LogitsProcessorContext,
    LogitsRequest,
    RowLogitsProcessor,
)
from tokenyard.interfaces.observer import Observer, ObserverContext
from tokenyard.interfaces.option_checks import check_positive
from tokenyard.interfaces.outcomes import StepOutcomes
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
from tokenyard.interfaces.predictor import OutputLengthPredictor, PredictorContext, possible_output_len
from tokenyard.interfaces.scheduler import (
    RequestSnapshot,
    RequestStatus,
    Scheduler,
    SchedulerContext,
    SchedulerSnapshot,
    WaitReason,
)
from tokenyard.interfaces.turns import keep_turns
from tokenyard.interfaces.workload import OUTPUT, Segment, Workload, WorkloadContext, WorkloadRequest

__all__ = [
    "OUTPUT",
    "AdmitDecision",
    "Allocation",
    "AttentionBackend",
    "AttentionBackendContext",
    "AttentionBatch",
    "AttentionLayer",
    "AttentionSpec",
    "ClientCounters",
    "EngineCore",
    "EngineCoreContext",
    "EvictionContext",
    "EvictionRule",
    "Executor",
    "ExecutorContext",
    "ExtraKey",
    "GrammarOutput",
    "Hit",
    "KVCacheGroupSpec",
    "KVCacheInspection",
    "KVCacheLayout",
    "KVCacheManager",
    "KVCacheManagerContext",
    "KVCachePlan",
    "KVCacheUsage",
    "KVRequest",
    "LatencyModel",
    "LatencyModelContext",
    "LogitsProcessor",
    "LogitsProcessorContext",
    "LogitsRequest",
    "Observer",
    "ObserverContext",
    "OutputLengthPredictor",
    "PauseMode",
    "PolicyContext",
    "PredictorContext",
    "PreemptMode",
    "Preemption",
    "RequestColumns",
    "RequestSnapshot",
    "RequestStatus",
    "RequestView",
    "RowLogitsProcessor",
    "Scheduler",
    "SchedulerContext",
    "SchedulerSnapshot",
    "SchedulerView",
    "SchedulingPolicy",
    "Segment",
    "StepFuture",
    "StepLatency",
    "StepLoad",
    "StepOutcome",
    "StepOutcomes",
    "WaitReason",
    "WorkerReport",
    "Workload",
    "WorkloadContext",
    "WorkloadRequest",
    "check_positive",
    "keep_turns",
    "possible_output_len",
    "service_alone",
]
