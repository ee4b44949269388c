"""Executor: runs steps on one or more workers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from tokenyard.clock import Clock
    from tokenyard.config import EngineConfig
    from tokenyard.interfaces.latency import LatencyModel
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput

ResultT_co = TypeVar("ResultT_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheGroupSpec:
    """Layers whose K/V share one block table.

    The groups share one pool of block ids and one allocation: layer i of every group lies in the same tensor, and a
    block id is used by one group at a time. So a block costs what it costs in the largest group.
    """

    num_layers: int
    bytes_per_token: int  # K and V of all the group's layers on one rank
    sliding_window: int | None = None  # tokens; None = full attention


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerReport:
    """What a worker knows once the model is loaded."""

    kv_cache_groups: Sequence[KVCacheGroupSpec]
    available_bytes: int  # for the K/V cache
    vocab_size: int  # rows of the embedding: token ids below it are legal
    decoder: str  # which one runs: "fast decoder (llama)", "adapter (GPT2LMHeadModel)", ...
    attention_backend: str
    device: str
    dtype: str
    load_seconds: float
    attention_description: str = ""  # what the backend says of itself beyond its name (since API 1.4)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCachePlan:
    """How large a K/V cache to allocate."""

    num_blocks: int
    block_size: int
    max_model_len: int | None = None  # prompt + output tokens of one request; None = the config's (since API 1.2)
    num_host_blocks: int = 0  # in host memory, of the same size, for K/V that is swapped out (since API 1.6)


@dataclass(frozen=True, slots=True, kw_only=True)
class GrammarOutput:
    """Token bitmasks of structured-output rows, for `sample_tokens`. No provider fills it yet."""

    slots: Sequence[int]
    bitmask: bytes


class StepFuture(Protocol[ResultT_co]):
    """The result of a step that may still be running."""

    @property
    def ready_at(self) -> float | None:
        """Simulation: the engine-clock time at which it is done. None: wait for `result` itself."""

    def result(self) -> ResultT_co:
        """Block until done; raises what the step raised."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutorContext:
    """What an executor's factory is given, in the engine process. Worker processes load plugins for themselves."""

    on_progress: Callable[[str], None] | None = None  # told the phase a long start is in, for people
    # How many steps the engine loop has in flight. Above 1, `execute_model` and `sample_tokens` return at once, and
    # their futures do the waiting (since API 1.2).
    steps_in_flight: int = 1
    # Of a simulation, for an executor whose descriptor says `is_simulated`: virtual time, and how long a step takes.
    clock: Clock | None = None  # since API 1.7
    latency: LatencyModel | None = None  # since API 1.7


class Executor(ABC):
    """Called by EngineCore only. Order: initialize, allocate_kv_cache, then steps, then shutdown.

    A step is `execute_model` followed by exactly one `sample_tokens`; steps are run strictly in the order given.
    """

    @abstractmethod
    def initialize(self, config: EngineConfig) -> WorkerReport:
        """Start the workers and load the model."""

    @abstractmethod
    def allocate_kv_cache(self, plan: KVCachePlan) -> None:
        """Allocate the K/V cache on every worker; called once."""

    @abstractmethod
    def execute_model(self, output: SchedulerOutput) -> StepFuture[None]:
        """Start the forward pass of a step."""

    @abstractmethod
    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepFuture[ModelRunnerOutput]:
        """Sample the tokens of the oldest step that was executed and not sampled yet."""

    @abstractmethod
    def collective_rpc(self, name: str, arguments: Sequence[object] = ()) -> Sequence[object]:
        """Call one of the workers' published functions on every worker; the results in rank order.

        Arguments and results are typed msgspec messages where they cross processes. An unknown name raises
        ConfigError with the known ones.
        """

    @abstractmethod
    def check_health(self) -> None:
        """Raise EngineDeadError when a worker cannot go on."""

    @abstractmethod
    def shutdown(self) -> None:
        """Stop the workers and give back their memory; a second call does nothing."""
