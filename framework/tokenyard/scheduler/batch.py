"""BatchScheduler: continuous batching under one token budget, with chunked prefill, prefix hits and preemption."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING, cast

import numpy as np

from tokenyard.errors import ConfigError, PluginError, TokenyardError, ValidationError
from tokenyard.interfaces.policy import Preemption, PreemptMode, RequestView, SchedulingPolicy, StepOutcome
from tokenyard.interfaces.scheduler import Scheduler, SchedulerContext
from tokenyard.scheduler.limits import Limits
from tokenyard.scheduler.outcome import EngineOutputBuilder, Taken
from tokenyard.scheduler.policy_calls import DECISION_POINTS, overridden, refuse_misspelt, refuse_unasked
from tokenyard.scheduler.request_state import Request, RequestStatus
from tokenyard.scheduler.slots import SlotTable
from tokenyard.scheduler.step import StepBuilder
from tokenyard.scheduler.view import PolicyView
from tokenyard.scheduler.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import BoolArray, IntArray
    from tokenyard.engine_outputs import EngineCoreOutputs, SchedulerStats
    from tokenyard.request import EngineCoreRequest, FinishReason
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)


class BatchScheduler(Scheduler):
    """Order of a step: running decodes, running prefills in admission order, then waiting requests by the policy's key.

    The first waiting request that does not fit ends the admission: nobody overtakes it. A request is admitted only
    when the blocks of all its known tokens are free, so prefill never stops half-way for lack of them; decoding that
    lacks a block preempts the policy's victim, which is recomputed later. At most one step may be in flight: a victim's
    blocks are free at once.
    """

    decision_points = frozenset({"waiting_key", "victim", "requeue_key"})

    def __init__(self, context: SchedulerContext, *, name: str = "batch") -> None:
        config = context.config
        self._policy = context.policy or SchedulingPolicy()
        refuse_misspelt(self._policy)
        refuse_unasked(self._policy, self.decision_points, name)
        self._calls = overridden(self._policy)
        self._clock = context.clock
        self._kv = context.kv_cache_manager
        self._limits = Limits(
            max_model_len=context.max_model_len,
            vocab_size=context.vocab_size,
            capacity=self._kv.capacity_tokens(),
        )
        self._max_num_seqs = config.max_num_seqs
        self._budget = config.max_num_batched_tokens
        self._can_chunk = config.enable_chunked_prefill
        self._max_chunk = config.long_prefill_token_threshold or self._budget
        if not self._can_chunk and self._budget < context.max_model_len:
            raise ConfigError(
                f"scheduler.max_num_batched_tokens={self._budget} < model.max_model_len={context.max_model_len}: "
                "without chunked prefill a longer prompt could never run; raise it, lower model.max_model_len, or set "
                "scheduler.enable_chunked_prefill=true"
            )
        self._table = SlotTable(config.max_num_seqs, context.max_model_len)
        self._requests: dict[str, Request] = {}
        self._landing: dict[int, Request] = {}  # by slot: ended, with a last step in flight
        self._waiting = WaitingQueue()
        self._running: list[Request] = []  # in admission order
        self._running_slots: IntArray = np.empty(0, dtype=np.int32)  # the same, as slots
        self._view = PolicyView(
            clock=context.clock,
            kv_cache_manager=self._kv,
            waiting=self._waiting,
            running=cast("list[RequestView]", self._running),
            block_size=context.block_size,
            seed=context.seed,
        )
        self._block_size = context.block_size
        self._steps = StepBuilder(self._table)
        self._outputs = EngineOutputBuilder(self._table, counts_prefix_cache=context.prefix_caching)
        self._num_preemptions = 0
        self._has_warned = False

    # Requests come and go

    def add_request(self, request: EngineCoreRequest) -> None:
        landing = (ended.request_id for ended in self._landing.values())
        if request.request_id in self._requests or request.request_id in landing:
            raise ValidationError(
                f"request id '{request.request_id}' is in use; give each live request an id of its own",
                parameter="request_id",
                value=request.request_id,
            )
        record = Request(request, self._limits.total_length(request))
        self._warn_of_priority(request)
        try:
            self._requests[request.request_id] = record
            if "on_arrival" in self._calls:
                self._ask("on_arrival", [record])
            self._waiting.push(record, self._ask("waiting_key", record))
        except BaseException:
            self._requests.pop(request.request_id, None)
            self._waiting.remove(request.request_id)
            raise

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        ended = [
            self._requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._requests
        ]
        for request in ended:
            self._end(request)
        self._tell_finished(ended, [reason] * len(ended))
        return [request.request_id for request in ended]

    def has_requests(self) -> bool:
        return bool(self._requests)

    def reset_prefix_cache(self) -> bool:
        return self._kv.reset()

    def wake_at(self) -> float | None:
        return None

    def stats(self) -> SchedulerStats:
        free, total = self._kv.usage
        return self._outputs.stats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_steps=self._steps.num_steps,
            num_preemptions=self._num_preemptions,
            num_free_blocks=free,
            num_total_blocks=total,
        )

    def _warn_of_priority(self, request: EngineCoreRequest) -> None:
        if request.priority and not self._calls & DECISION_POINTS and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "priority=%d changes nothing: policy %s decides nothing by it",
                request.priority,
                type(self._policy).__name__,
            )

    # One step

    def schedule(self) -> SchedulerOutput | None:
        num_preemptions = self._num_preemptions
        left = self._schedule_running(self._budget)
        if self._num_preemptions == num_preemptions:
            # A victim of this step would otherwise take back at once what it has just given up.
            self._admit(left)
        return self._steps.finish(self._clock.now())

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        alive = self._land(output)
        taken = self._outputs.take_tokens(output, result, alive)
        self._commit(output.slots[alive])
        outputs = self._outputs.build(output, result, taken)
        finished = [end for end in outputs.finished if end.request_id in self._requests]
        ended = [self._requests[end.request_id] for end in finished]
        if "on_step" in self._calls:
            self._ask("on_step", self._step_outcomes(output, taken, alive, ended))
        for request in ended:
            self._end(request)
        self._tell_finished(ended, [end.reason for end in finished])
        return dataclasses.replace(outputs, stats=self.stats())

    # Scheduling, in parts

    def _schedule_running(self, budget: int) -> int:
        """Give tokens to what runs already; returns what is left of the budget."""
        slots = self._running_slots
        wanted = self._table.num_tokens[slots] - self._table.num_computed[slots]
        is_decode = wanted == 1
        decodes = slots[is_decode]
        # Few rows lack blocks in a step: those at a block boundary.
        lacking = self._table.num_computed[decodes] + 1 > self._table.valid_until[decodes]
        if lacking.any():
            decodes = self._grow_tables(decodes, lacking)
        self._steps.add_running(decodes, np.ones(len(decodes), dtype=np.int32))
        left = budget - len(decodes)
        for slot in slots[wanted > 1].tolist():
            request = self._table.requests[slot]
            if left <= 0:
                break
            if request is None:  # preempted for a decode of this step
                continue
            missing = int(self._table.num_tokens[slot] - self._table.num_computed[slot])
            count = min(missing, left, self._max_chunk)
            self._steps.add_running(np.array([slot], dtype=np.int32), np.array([count], dtype=np.int32))
            left -= count
        return left

    def _grow_tables(self, decodes: IntArray, lacking: BoolArray) -> IntArray:
        """Get a block for each lacking row, preempting if need be; returns the decodes that still run."""
        for slot in decodes[lacking].tolist():
            request = self._table.requests[slot]
            while request is not None and not self._grow_table(request, slot):
                self._preempt_one(first=request)
                request = self._table.requests[slot]  # None when it was its own victim
        return decodes[self._table.is_held[decodes]]

    def _grow_table(self, request: Request, slot: int) -> bool:
        start = -(-int(self._table.valid_until[slot]) // self._block_size)
        allocation = self._kv.allocate(request, int(self._table.num_computed[slot]) + 1)
        if allocation is None:
            return False
        self._table.valid_until[slot] = allocation.valid_until_tokens
        self._steps.add_blocks(slot, start, allocation)
        return True

    def _preempt_one(self, first: Request) -> None:
        """Take the blocks of one running request that has got nothing in this step yet."""
        candidates = self._running[self._running.index(first) :]
        victim = self._choose_victim(candidates)
        preemption = Preemption(victim, victim.num_computed_tokens, PreemptMode.RECOMPUTE)
        self._num_preemptions += 1
        victim.num_preemptions += 1
        self._leave_batch(victim, RequestStatus.PREEMPTED)
        if "on_preempt" in self._calls:
            self._ask("on_preempt", [preemption])
        key = self._ask("requeue_key", victim) if "requeue_key" in self._calls else None
        if key is None:
            self._waiting.push_front(victim)
        else:
            self._waiting.push(victim, key)

    def _choose_victim(self, candidates: list[Request]) -> Request:
        if "victim" not in self._calls:
            return candidates[-1]
        chosen = self._ask("victim", candidates, 1)
        for request in candidates:
            if request is chosen:
                return request
        raise PluginError(
            f"policy {type(self._policy).__name__} chose {chosen!r} as victim, which is none of the "
            f"{len(candidates)} candidates it was given"
        )

    def _admit(self, left: int) -> None:
        admitted: list[Request] = []
        while left > 0 and len(self._running) + len(admitted) < self._max_num_seqs:
            request = self._waiting.peek()
            if request is None:
                break
            hit = self._kv.lookup(request)
            missing = request.num_tokens - hit.tokens
            count = min(missing, left, self._max_chunk) if self._can_chunk else missing
            if count > left:
                break
            allocation = self._kv.allocate(request, request.num_tokens, hit)
            if allocation is None:
                break
            self._waiting.remove(request.request_id)
            status, slot = request.status, self._table.acquire(request)
            self._steps.add_start(request, slot, status, hit.tokens, allocation)
            self._steps.add_running(np.array([slot.index], dtype=np.int32), np.array([count], dtype=np.int32))
            admitted.append(request)
            left -= count
        if admitted:
            self._running.extend(admitted)
            self._refresh_running()
            if "on_admit" in self._calls:
                self._ask("on_admit", admitted)

    # Updating, in parts

    def _land(self, output: SchedulerOutput) -> BoolArray:
        """A step has come back: settle what was in flight; returns [R] which rows' requests are still here."""
        table, slots = self._table, output.slots
        table.steps_in_flight[slots] -= 1
        # A slot is not given away before its last step in flight has landed, so a slot that is held is held by
        # the request that the step names.
        alive = table.is_held[slots]
        table.num_in_flight[slots[alive]] -= output.num_scheduled_tokens[alive]
        table.attained_service[slots[alive]] += output.num_scheduled_tokens[alive]
        for slot in slots[~alive & (table.steps_in_flight[slots] == 0)].tolist():
            self._kv.free(self._landing.pop(slot))
            table.release(slot)
        return alive

    def _commit(self, slots: IntArray) -> None:
        """Publish blocks that this step completed."""
        table = self._table
        computed = table.num_computed[slots] - table.num_in_flight[slots]
        for slot in slots[computed // self._block_size > table.num_committed[slots] // self._block_size].tolist():
            request = table.requests[slot]
            if request is not None:
                num_computed = int(table.num_computed[slot] - table.num_in_flight[slot])
                self._kv.commit(request, num_computed)
                table.num_committed[slot] = num_computed

    def _step_outcomes(
        self, output: SchedulerOutput, taken: Taken, alive: BoolArray, ended: Sequence[Request]
    ) -> list[StepOutcome]:
        num_new = dict(zip(taken.slots.tolist(), taken.num_tokens.tolist(), strict=True))
        outcomes = []
        for slot, computed in zip(
            output.slots[alive].tolist(), output.num_scheduled_tokens[alive].tolist(), strict=True
        ):
            request = self._table.requests[slot]
            if request is not None:
                new = num_new.get(slot, 0)
                is_first = new > 0 and request.num_output_tokens == new
                outcomes.append(StepOutcome(request, computed, new, is_first, request in ended))
        return outcomes

    # Bookkeeping

    def _ask(self, method: str, *arguments: object) -> object:
        """Call the policy; what it raises is told with its name, and a policy cannot end the process."""
        try:
            return getattr(self._policy, method)(*arguments, self._view)
        except TokenyardError:
            raise
        except (Exception, SystemExit) as error:
            raise PluginError(
                f"scheduling policy {type(self._policy).__name__} failed in {method}: {type(error).__name__}: {error}"
            ) from error

    def _end(self, request: Request) -> None:
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._leave_batch(request, RequestStatus.FINISHED)
        else:
            self._waiting.remove(request.request_id)
            self._kv.free(request)
            request.status = RequestStatus.FINISHED

    def _leave_batch(self, request: Request, status: RequestStatus) -> None:
        slot = request.slot
        if slot is None:
            raise RuntimeError(f"request {request.request_id} runs without a slot")
        request.leave(status)
        self._steps.add_ended(slot)
        self._table.detach(slot)
        if self._table.steps_in_flight[slot]:
            # A step in flight still writes to its blocks and names its slot: nobody else gets them before it lands.
            self._landing[slot] = request
        else:
            self._kv.free(request)
            self._table.release(slot)
        self._running.remove(request)
        self._refresh_running()

    def _refresh_running(self) -> None:
        self._running_slots = np.array([request.slot for request in self._running], dtype=np.int32)

    def _tell_finished(self, requests: Sequence[Request], reasons: Sequence[FinishReason]) -> None:
        if requests and "on_finish" in self._calls:
            self._ask("on_finish", requests, reasons)
