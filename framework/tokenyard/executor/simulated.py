"""SimulatedExecutor: no model; says when a step would be done."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

import numpy as np

from tokenyard.errors import ConfigError, PluginError
from tokenyard.interfaces.executor import Executor, KVCacheGroupSpec, WorkerReport
from tokenyard.interfaces.latency import StepLoad
from tokenyard.runner_output import ModelRunnerOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import IntArray
    from tokenyard.config import EngineConfig
    from tokenyard.interfaces.executor import ExecutorContext, GrammarOutput, KVCachePlan
    from tokenyard.scheduler_output import SchedulerOutput

ResultT_co = TypeVar("ResultT_co", covariant=True)

VOCAB_SIZE = 2**31 - 1  # what a 32-bit token id can name
_LONGEST_STEP = 1e9  # seconds: three decades
OUTPUT_TOKEN = 0  # what every row of every step is said to have sampled


class _Done(NamedTuple, Generic[ResultT_co]):
    """A result that is known, of a step that ends at `ready_at`."""

    value: ResultT_co
    ready_at: float | None

    def result(self) -> ResultT_co:
        return self.value


_EXECUTED = _Done(None, None)


def report_without_model(vocab_size: int) -> WorkerReport:
    """What an executor says that has loaded nothing: a token's K/V takes a byte, and there is no memory to fill."""
    return WorkerReport(
        kv_cache_groups=(KVCacheGroupSpec(num_layers=1, bytes_per_token=1),),
        available_bytes=0,
        vocab_size=vocab_size,
        decoder="none",
        attention_backend="none",
        device="none",
        dtype="none",
        load_seconds=0.0,
    )


class SimulatedExecutor(Executor):
    """Steps run one after the other; each begins when it is asked for, or when the one before it is done."""

    def __init__(self, context: ExecutorContext) -> None:
        if context.clock is None or context.latency is None:
            raise ConfigError(
                "executor=simulated has no model: it runs in `tokenyard simulate` and `tokenyard experiment`, on "
                "virtual time; choose executor=inproc for answers"
            )
        self._clock = context.clock
        self._latency = context.latency
        self._free_at = context.clock.now()
        self._waiting: list[tuple[SchedulerOutput, float]] = []  # executed, not sampled
        self._tokens: IntArray = np.full(256, OUTPUT_TOKEN, dtype=np.int32)

    def initialize(self, config: EngineConfig) -> WorkerReport:
        return report_without_model(VOCAB_SIZE)

    def allocate_kv_cache(self, plan: KVCachePlan) -> None:
        """There is nothing to allocate."""

    def execute_model(self, output: SchedulerOutput) -> _Done[None]:
        seconds = self._seconds_of(load_of(output))
        begin = max(self._free_at, self._clock.now())
        self._free_at = begin + seconds
        if self._free_at == begin:
            raise PluginError(
                f"a step of {seconds!r} s at time {begin!r} ends when it begins: numbers of 64 bits cannot tell; "
                "choose longer steps or earlier times"
            )
        self._waiting.append((output, self._free_at))
        return _EXECUTED

    def _seconds_of(self, load: StepLoad) -> float:
        name = type(self._latency).__name__
        try:
            seconds = self._latency.step_seconds(load)
        except Exception as error:
            raise PluginError(f"latency model {name} raised {type(error).__name__} for {load}: {error}") from error
        if not isinstance(seconds, float | int) or not 0 < seconds <= _LONGEST_STEP:  # also refuses NaN
            raise PluginError(
                f"latency model {name} returned {seconds!r} for {load}; step_seconds must be a "
                f"number of seconds above 0 and at most {_LONGEST_STEP:g}"
            )
        return seconds

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> _Done[ModelRunnerOutput]:
        output, ready_at = self._waiting.pop(0)
        token_ids = self._sampled(int(np.count_nonzero(output.samples)))
        result = ModelRunnerOutput(step=output.step, num_sampled=output.samples.astype(np.int32), token_ids=token_ids)
        return _Done(result, ready_at)

    def collective_rpc(self, name: str, arguments: Sequence[object] = ()) -> Sequence[object]:
        raise ConfigError(f"unknown function '{name}'; a simulated executor publishes none")

    def check_health(self) -> None:
        """Nothing can have gone wrong."""

    def shutdown(self) -> None:
        """Nothing was started."""

    def _sampled(self, count: int) -> IntArray:
        if count > len(self._tokens):
            self._tokens = np.full(2 * count, OUTPUT_TOKEN, dtype=np.int32)
        return self._tokens[:count]


def load_of(output: SchedulerOutput) -> StepLoad:
    """What a step computes. A row that computes one token, the last it knows of, is a decode."""
    computed, counts = output.num_computed_tokens, output.num_scheduled_tokens
    is_prefill = (counts > 1) | ~output.samples
    chunks, before = counts[is_prefill].tolist(), computed[is_prefill].tolist()  # a few, mostly
    prefill_context = sum(before)
    return StepLoad(
        num_decodes=len(counts) - len(chunks),
        num_decode_context_tokens=int(computed.sum()) - prefill_context,
        num_prefills=len(chunks),
        num_prefill_tokens=sum(chunks),
        num_prefill_context_tokens=prefill_context,
    )
