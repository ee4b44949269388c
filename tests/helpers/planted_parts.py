"""Small parts of other authors: a K/V manager that is right, and parts with a fault each that a suite must find."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from tokenyard.config import NoOptions
from tokenyard.descriptors import (
    Descriptor,
    EngineCoreDescriptor,
    ExecutorDescriptor,
    KVCacheManagerDescriptor,
    ObserverDescriptor,
    PolicyDescriptor,
    SchedulerDescriptor,
)
from tokenyard.engine.sync import SyncEngineCore
from tokenyard.executor.inproc import InProcessExecutor
from tokenyard.interfaces import (
    Allocation,
    EngineCore,
    EngineCoreContext,
    Executor,
    ExecutorContext,
    GrammarOutput,
    Hit,
    KVCacheInspection,
    KVCacheManager,
    KVCacheManagerContext,
    KVCacheUsage,
    KVRequest,
    Observer,
    PauseMode,
    Scheduler,
    SchedulerContext,
    SchedulingPolicy,
    StepFuture,
)
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.scheduler import BatchScheduler
from tokenyard.testing.contracts.kv_driver import DrivenRequest
from tokenyard.testing.contracts.recorders import RecordingExecutor, RecordingScheduler

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.request import FinishReason
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput

PartT = TypeVar("PartT")

# K/V managers


class TinyManager(KVCacheManager):
    """One group, no sharing: a right one, in as few lines as it takes."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.unused = deque(range(1, num_blocks + 1))
        self.tables: dict[str, list[int]] = {}

    def lookup(self, request: KVRequest) -> Hit:
        return Hit(0)

    def allocate(
        self, request: KVRequest, num_tokens: int, hit: Hit | None = None, num_lookahead: int = 0
    ) -> Allocation | None:
        table = self.tables.get(request.request_id, [])
        count = max(0, -(-(num_tokens + num_lookahead) // self.block_size) - len(table))
        if count > len(self.unused):
            return None
        new = [self.unused.popleft() for _ in range(count)]
        self.tables[request.request_id] = table + new
        return Allocation((np.array(new, dtype=np.int32),), (len(table) + len(new)) * self.block_size)

    def commit(self, request: KVRequest, num_computed_tokens: int) -> None: ...

    def free(self, request: KVRequest) -> None:
        self.unused.extend(self.tables.pop(request.request_id, ()))

    def reset(self) -> bool:
        return len(self.unused) == self.num_blocks

    def block_ids(self, request: KVRequest) -> tuple[IntArray, ...]:
        return (np.array(self.tables.get(request.request_id, ()), dtype=np.int32),)

    @property
    def usage(self) -> KVCacheUsage:
        return KVCacheUsage(len(self.unused), self.num_blocks)

    def capacity_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def inspect(self) -> KVCacheInspection:
        counts = dict.fromkeys(range(1, self.num_blocks + 1), 0)
        for block_id in (one for table in self.tables.values() for one in table):
            counts[block_id] += 1
        return KVCacheInspection(ref_counts=counts, cached_hashes=frozenset())


class OldTinyManager(TinyManager):
    """Written for plugin API 1.1: it cannot be inspected."""

    inspect = KVCacheManager.inspect


class Leaking(TinyManager):
    """Every third request's last block never comes back."""

    num_freed = 0

    def free(self, request: KVRequest) -> None:
        table = self.tables.get(request.request_id)
        self.num_freed += bool(table)
        if table and self.num_freed % 3 == 0:
            table.pop()
        super().free(request)


class HandsOutTwice(TinyManager):
    """A block of somebody else's, and counts that hide it."""

    def allocate(
        self, request: KVRequest, num_tokens: int, hit: Hit | None = None, num_lookahead: int = 0
    ) -> Allocation | None:
        others = [table for name, table in self.tables.items() if name != request.request_id and table]
        allocation = super().allocate(request, num_tokens, hit, num_lookahead)
        if allocation is None or not len(allocation.new_block_ids[0]) or not others:
            return allocation
        own = self.tables[request.request_id]
        self.unused.append(own[-1])
        own[-1] = others[0][0]
        new = own[len(own) - len(allocation.new_block_ids[0]) :]
        return Allocation((np.array(new, dtype=np.int32),), allocation.valid_until_tokens)

    def free(self, request: KVRequest) -> None:
        table = self.tables.pop(request.request_id, [])
        others = {block_id for other in self.tables.values() for block_id in other}
        self.unused.extend(block_id for block_id in dict.fromkeys(table) if block_id not in others)


class HalfAllocates(TinyManager):
    """Keeps what it got when there is not enough."""

    def allocate(
        self, request: KVRequest, num_tokens: int, hit: Hit | None = None, num_lookahead: int = 0
    ) -> Allocation | None:
        allocation = super().allocate(request, num_tokens, hit, num_lookahead)
        if allocation is None and self.unused:
            self.tables.setdefault(request.request_id, []).append(self.unused.popleft())
        return allocation


class ImpureLookup(TinyManager):
    """Counts are untouched, but what is handed out next has changed."""

    def lookup(self, request: KVRequest) -> Hit:
        self.unused.rotate(1)
        return Hit(0)


class FreesInHashOrder(TinyManager):
    """Which block is used next depends on the hash of an id."""

    def free(self, request: KVRequest) -> None:
        if hash(request.request_id) % 2:
            self.tables.get(request.request_id, []).reverse()
        super().free(request)


class Stingy(TinyManager):
    """Says that it is full while it is not."""

    def allocate(
        self, request: KVRequest, num_tokens: int, hit: Hit | None = None, num_lookahead: int = 0
    ) -> Allocation | None:
        return None if len(self.unused) < self.num_blocks // 2 else super().allocate(request, num_tokens, hit)


class ResetsInUse(TinyManager):
    """Says that it was reset although requests hold blocks."""

    def reset(self) -> bool:
        return True


class BreaksOnUnknown(TinyManager):
    """A request that holds nothing is an error to it."""

    def free(self, request: KVRequest) -> None:
        self.unused.extend(self.tables.pop(request.request_id))


class _OverPaged(PagedKVCacheManager):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks=num_blocks, block_size=block_size)


class HitsWholePrompt(_OverPaged):
    """Leaves nothing to compute when the whole prompt is cached."""

    def lookup(self, request: KVRequest) -> Hit:
        longer = DrivenRequest(request.request_id, [*request.token_ids.tolist(), 0], request.cache_salt)
        return Hit(0) if request.skip_prefix_cache else super().lookup(longer)


class IgnoresSalt(_OverPaged):
    """One tenant finds what another computed."""

    def lookup(self, request: KVRequest) -> Hit:
        return super().lookup(_unsalted(request))

    def num_saved_blocks(self, request: KVRequest, hit: Hit, without: Sequence[KVRequest] = ()) -> int:
        return super().num_saved_blocks(_unsalted(request), hit, without)

    def allocate(
        self, request: KVRequest, num_tokens: int, hit: Hit | None = None, num_lookahead: int = 0
    ) -> Allocation | None:
        return super().allocate(_unsalted(request), num_tokens, hit, num_lookahead)

    def commit(self, request: KVRequest, num_computed_tokens: int) -> None:
        super().commit(_unsalted(request), num_computed_tokens)


class CommitsTooEarly(_OverPaged):
    """Lets others find what nobody has computed yet."""

    def allocate(
        self, request: KVRequest, num_tokens: int, hit: Hit | None = None, num_lookahead: int = 0
    ) -> Allocation | None:
        allocation = super().allocate(request, num_tokens, hit, num_lookahead)
        if allocation is not None:
            super().commit(request, num_tokens)
        return allocation


class NeverForgets(_OverPaged):
    """Finds blocks by what they held once."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self._seen: list[list[int]] = []

    def commit(self, request: KVRequest, num_computed_tokens: int) -> None:
        super().commit(request, num_computed_tokens)
        full = num_computed_tokens // self._block_size * self._block_size
        self._seen.append(request.token_ids[:full].tolist())

    def lookup(self, request: KVRequest) -> Hit:
        tokens = request.token_ids.tolist()
        found = max((len(one) for one in self._seen if one == tokens[: len(one)] and len(one) < len(tokens)), default=0)
        return max(super().lookup(request), Hit(found))


def _unsalted(request: KVRequest) -> DrivenRequest:
    return DrivenRequest(request.request_id, request.token_ids.tolist())


# Schedulers


class OverBudget(BatchScheduler):
    """Takes some tokens more than it may."""

    def __init__(self, context: SchedulerContext) -> None:
        config = context.config
        more = dataclasses.replace(config, max_num_batched_tokens=config.max_num_batched_tokens + 3)
        super().__init__(dataclasses.replace(context, config=more))


class LeavesRoom(BatchScheduler):
    """Runs one request less than it could."""

    def __init__(self, context: SchedulerContext) -> None:
        fewer = dataclasses.replace(context.config, max_num_seqs=max(1, context.config.max_num_seqs - 1))
        super().__init__(dataclasses.replace(context, config=fewer))


class WrappedScheduler(RecordingScheduler):
    decision_points = BatchScheduler.decision_points

    def __init__(self, context: SchedulerContext) -> None:
        super().__init__(BatchScheduler(context), [])
        self.num_calls = 0


class LosesOnFinish(WrappedScheduler):
    """Of several ids it ends the first, and says that it ended all."""

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        super().finish_requests(request_ids[:1], reason)
        return [one for one in dict.fromkeys(request_ids) if not one.startswith("nobody")]


class ForgetsEnds(WrappedScheduler):
    """Requests end and nobody is told."""

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        return dataclasses.replace(super().update_from_output(output, result), finished=())


class TellsTwice(WrappedScheduler):
    """Requests end, and end again."""

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        outputs = super().update_from_output(output, result)
        return dataclasses.replace(outputs, finished=(*outputs.finished, *outputs.finished))


class FallsAsleep(WrappedScheduler):
    """Every third time nothing is scheduled, for no reason."""

    def schedule(self) -> SchedulerOutput | None:
        self.num_calls += 1
        return None if self.num_calls % 3 == 0 else super().schedule()


class DropsATenthToken(WrappedScheduler):
    """A token is lost on its way."""

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        outputs = super().update_from_output(output, result)
        self.num_calls += 1
        if self.num_calls % 10:
            return outputs
        nothing = np.empty(0, dtype=np.int32)
        return dataclasses.replace(outputs, request_ids=(), num_tokens=nothing, token_ids=nothing)


# Engine loops


class UpdatesTwice(SyncEngineCore):
    """Takes a step in, and then once more."""

    def __init__(self, context: EngineCoreContext) -> None:
        super().__init__(dataclasses.replace(context, scheduler=_DoubleUpdate(context.scheduler)))


class _DoubleUpdate(RecordingScheduler):
    def __init__(self, inner: Scheduler) -> None:
        super().__init__(inner, [])
        self._target = inner

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        outputs = self._target.update_from_output(output, result)
        self._target.update_from_output(output, result)
        return outputs


class SamplesBeforeExecuting(SyncEngineCore):
    """Asks for tokens of a step that it has not handed over."""

    def __init__(self, context: EngineCoreContext) -> None:
        super().__init__(dataclasses.replace(context, executor=_Hasty(context.executor)))


class _Hasty(RecordingExecutor):
    def __init__(self, inner: Executor) -> None:
        super().__init__(inner, [])
        self._target = inner

    def execute_model(self, output: SchedulerOutput) -> StepFuture[None]:
        self._target.sample_tokens()
        return self._target.execute_model(output)


class IgnoresPauses(SyncEngineCore):
    """Goes on as if nothing had been said."""

    def pause(self, mode: PauseMode = PauseMode.KEEP) -> Sequence[str]:
        return ()


class ForgetsItIsDead(SyncEngineCore):
    """An error in a step is told once, and then it goes on with a cache that nobody knows."""

    def step(self) -> EngineCoreOutputs:
        try:
            return super().step()
        finally:
            self._failure = None


class KillsTheExecutorTwice(SyncEngineCore):
    """Shuts down again each time it is asked."""

    def shutdown(self) -> None:
        self._executor.shutdown()


# Executors and observers


@dataclasses.dataclass(frozen=True)
class _Swapped:
    inner: StepFuture[ModelRunnerOutput]
    ready_at: float | None = None

    def result(self) -> ModelRunnerOutput:
        result = self.inner.result()
        return dataclasses.replace(result, token_ids=result.token_ids[::-1])


class SwapsRows(InProcessExecutor):
    """The first row gets the last one's token."""

    def sample_tokens(self, grammar: GrammarOutput | None = None) -> StepFuture[ModelRunnerOutput]:
        return _Swapped(super().sample_tokens(grammar))


class AnswersAnything(InProcessExecutor):
    """Knows every function."""

    def collective_rpc(self, name: str, arguments: Sequence[object] = ()) -> Sequence[object]:
        return ["ok"]


class Mutates(Observer):
    """Hides tokens from the front end."""

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        result.token_ids[:] = 0


class NeedsStats(Observer):
    """Believes that stats are always there."""

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        if result.stats is None:
            raise TypeError("no stats")


# Descriptors: what makes the part is called with what its factory is given.


def policy(make: Callable[[], SchedulingPolicy]) -> Descriptor[NoOptions]:
    return PolicyDescriptor(name="planted", api_version=(1, 3), factory=lambda options, context: make())


def manager(make: Callable[[int, int], KVCacheManager]) -> Descriptor[NoOptions]:
    def factory(options: NoOptions, context: KVCacheManagerContext) -> KVCacheManager:
        return make(context.num_blocks, context.config.block_size)

    return KVCacheManagerDescriptor(name="planted", api_version=(1, 3), factory=factory)


def scheduler(make: Callable[[SchedulerContext], Scheduler]) -> Descriptor[NoOptions]:
    return SchedulerDescriptor(name="planted", api_version=(1, 3), factory=lambda options, context: make(context))


def engine(make: Callable[[EngineCoreContext], EngineCore]) -> Descriptor[NoOptions]:
    return EngineCoreDescriptor(name="planted", api_version=(1, 3), factory=lambda options, context: make(context))


def executor(make: Callable[[ExecutorContext], Executor]) -> Descriptor[NoOptions]:
    return ExecutorDescriptor(name="planted", api_version=(1, 3), factory=lambda options, context: make(context))


def observer(make: Callable[[], Observer]) -> Descriptor[NoOptions]:
    return ObserverDescriptor(name="planted", api_version=(1, 3), factory=lambda options, context: make())
