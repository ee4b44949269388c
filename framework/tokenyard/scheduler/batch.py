"""BatchScheduler: continuous batching under one token budget, with chunked prefill, prefix hits and preemption."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, cast

import numpy as np

from tokenyard.engine_outputs import (
    AdmittedRequest,
    EngineCoreOutputs,
    FinishedRequest,
    RequestEvent,
    SchedulerStats,
)
from tokenyard.errors import ValidationError
from tokenyard.interfaces.policy import RequestView, SchedulingPolicy, StepOutcome
from tokenyard.interfaces.scheduler import RequestStatus, Scheduler, SchedulerContext, SchedulerSnapshot, WaitReason
from tokenyard.request import FinishReason
from tokenyard.scheduler.admission import Admission
from tokenyard.scheduler.counters import Counters
from tokenyard.scheduler.deadlines import Deadlines
from tokenyard.scheduler.events import RequestEvents
from tokenyard.scheduler.limits import limits_of
from tokenyard.scheduler.policy_calls import PolicyCalls
from tokenyard.scheduler.preemption import BlockGrowth
from tokenyard.scheduler.request_state import Request
from tokenyard.scheduler.running import Landed, RunningBatch
from tokenyard.scheduler.sampled import SampledTokens, Taken
from tokenyard.scheduler.slots import SAMPLED, STEPS, TOKENS, SlotTable
from tokenyard.scheduler.step import StepBuilder
from tokenyard.scheduler.view import PolicyView
from tokenyard.scheduler.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenyard.arrays import IntArray, LongArray
    from tokenyard.request import EngineCoreRequest
    from tokenyard.runner_output import ModelRunnerOutput, PromptLogprobs
    from tokenyard.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)


class BatchScheduler(Scheduler):
    """Order of a step: running decodes, running prefills in admission order, then waiting requests by the policy's key.

    The first waiting request that does not fit ends the admission: nobody overtakes it. Decoding that lacks a block
    preempts the policy's victim, which is recomputed later. Any number of steps may be in flight: a row may be
    scheduled again before its token has arrived, and what a step in flight still names is not given away.
    """

    decision_points = frozenset({"admit", "waiting_key", "victim", "requeue_key", "wake_at"})

    def __init__(self, context: SchedulerContext, *, name: str = "batch") -> None:
        config = context.config
        self._clock, self._kv = context.clock, context.kv_cache_manager
        self._budget = config.max_num_batched_tokens
        self._max_chunk = config.long_prefill_token_threshold or self._budget
        self._block_size, self._log_stats = context.block_size, context.log_stats
        self._limits = limits_of(context)
        self._requests: dict[str, Request] = {}
        self._policy = PolicyCalls(context.policy or SchedulingPolicy(), self.decision_points, name)
        # Twice as many as may run: those whose last step is in flight keep theirs. What is not used costs no memory.
        self._table = SlotTable(2 * config.max_num_seqs, context.max_model_len)
        self._steps = StepBuilder(self._table)
        self._waiting = WaitingQueue()
        self._running = RunningBatch(self._table, self._kv, self._steps)
        self._deadlines = Deadlines(self._requests)
        self._sampled = SampledTokens(self._table)
        self._counters = Counters(counts_prefix_cache=context.prefix_caching)
        self._events = RequestEvents(self._clock, is_on=self._log_stats)
        self._growth = BlockGrowth(
            table=self._table,
            kv_cache_manager=self._kv,
            running=self._running,
            waiting=self._waiting,
            steps=self._steps,
            policy=self._policy,
            events=self._events,
            block_size=self._block_size,
        )
        self._admission = Admission(
            config,
            table=self._table,
            kv_cache_manager=self._kv,
            running=self._running,
            waiting=self._waiting,
            steps=self._steps,
            policy=self._policy,
            counters=self._counters,
            events=self._events,
            clock=self._clock,
            block_size=self._block_size,
            fail=self._fail,
        )
        self._policy.use(
            PolicyView(
                clock=context.clock,
                kv_cache_manager=self._kv,
                waiting=self._waiting,
                running=cast("dict[str, RequestView]", self._running.requests),
                block_size=self._block_size,
                seed=context.seed,
            )
        )
        self._admitted: dict[int, list[AdmittedRequest]] = {}  # by step, until it has landed
        self._ended: list[FinishedRequest] = []  # outside a step, not told yet
        self._has_warned = False

    # Requests come and go

    def add_request(self, request: EngineCoreRequest) -> None:
        record = Request(request, self._limits.total_length(request), self._limits.min_tokens(request))
        if request.request_id in self._requests or any(end.request_id == request.request_id for end in self._ended):
            raise ValidationError(
                f"request id '{request.request_id}' is in use; give each live request an id of its own",
                parameter="request_id",
                value=request.request_id,
            )
        self._warn_of_priority(request)
        try:
            self._requests[request.request_id] = record
            self._policy.on_arrival([record])
            decision = self._policy.admit(record)
            self._admission.queue(record)
        except BaseException:
            self._requests.pop(request.request_id, None)
            raise
        self._deadlines.add(record)
        if decision.kind == "reject":
            self._admission.reject(record, decision.reason)

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        ended = [
            self._requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._requests
        ]
        self._end(ended, [reason] * len(ended))
        return [request.request_id for request in ended]

    def take_finished(self) -> Sequence[FinishedRequest]:
        self._expire()
        ended, self._ended = self._ended, []
        return ended

    def take_events(self) -> Sequence[RequestEvent]:
        return self._events.take()

    def has_requests(self) -> bool:
        return bool(self._requests) or bool(self._ended)

    def pause_admission(self, is_paused: bool) -> None:
        self._admission.is_paused = is_paused

    def reset_prefix_cache(self) -> bool:
        return self._kv.reset()

    def wake_at(self) -> float | None:
        return min((at for at in (self._deadlines.next_time(), self._policy.wake_at()) if at is not None), default=None)

    def stats(self) -> SchedulerStats:
        free, total = self._kv.usage
        counters = self._counters
        reason = self._admission.wait_reason() if self._waiting else None
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            num_skipped=self._admission.num_deferred,
            num_steps=self._steps.num_steps,
            num_preemptions=self._growth.num_preemptions,
            num_prompt_tokens=counters.num_prompt_tokens,
            num_generation_tokens=counters.num_generation_tokens,
            prefix_cache_queries=counters.prefix_cache_queries,
            prefix_cache_hits=counters.prefix_cache_hits,
            preempted_prefix_cache_queries=counters.preempted_prefix_cache_queries,
            preempted_prefix_cache_hits=counters.preempted_prefix_cache_hits,
            num_free_blocks=free,
            num_total_blocks=total,
            wait_reason=None if reason is None else reason.value,
            num_waiting_by_reason=self._admission.num_waiting_by_reason() if self._waiting else {},
            num_rejected_by_reason=dict(counters.num_rejected_by_reason),
        )

    def snapshot(self, limit: int | None = None) -> SchedulerSnapshot:
        return SchedulerSnapshot(
            running=tuple(request.snapshot(None) for request in self._running.requests.values()),
            waiting=tuple(self._admission.explain(limit)),
        )

    # One step

    def schedule(self) -> SchedulerOutput | None:
        self._expire()
        left = self._schedule_running()
        admitted = self._admission.admit(left, self._blocked())
        output = self._steps.finish(self._clock.now())
        if output is not None:
            self._events.scheduled(output, self._steps.num_prefills, self._table)
            if admitted:
                self._note_admitted(admitted, output)
        return output

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        landed = self._running.land(output)
        taken = self._sampled.take(output, result, landed)
        is_odd = not len(result.token_ids) == len(output.slots) == np.count_nonzero(result.num_sampled)
        if is_odd:
            self._step_back(output, result)
        self._commit(output.slots if landed.alive is None else output.slots[landed.alive], result.errors)
        self._counters.num_generation_tokens += len(taken.token_ids)
        prompt_logprobs = self._sampled.prompt_logprobs(output, result, landed)
        ends = self._sampled.ends(output, result, landed, taken, self._requests)
        if self._policy.wants_steps:
            self._policy.on_step(self._step_outcomes(output, taken, landed, {end.request_id for end in ends}))
        self._end([self._requests[end.request_id] for end in ends], [end.reason for end in ends])
        for row, request in landed.preempted:
            request.attain(int(output.num_scheduled_tokens[row]))
        if is_odd:
            self._restart_odd(output, result, landed)
        self._events.landed(output.step)
        return self._told(output, result, taken, ends, prompt_logprobs)

    # Scheduling, in parts

    def _schedule_running(self) -> int:
        """Give tokens to what runs already; returns what is left of the budget."""
        table, slots = self._table, self._running.slots()
        self._growth.begin_step()
        known = table.num_tokens[slots] + table.in_flight[slots, SAMPLED]
        missing = known - table.num_computed[slots]
        # A row whose last token is being sampled already has nothing more to compute.
        is_decode = (missing == 1) & (known < table.max_total_tokens[slots])
        is_all = np.count_nonzero(is_decode) == len(slots)
        can_run = None
        lacking = known > table.valid_until[slots]
        if np.count_nonzero(lacking):
            can_run = self._growth.grow(slots, known, lacking if is_all else lacking & (is_decode | (missing > 1)))
        if is_all and can_run is None:
            self._steps.add_decodes(slots)
            return self._budget - len(slots)
        decodes = slots[is_decode if can_run is None else is_decode & can_run]
        self._steps.add_decodes(decodes)
        is_prefill = missing > 1 if can_run is None else (missing > 1) & can_run
        return self._schedule_prefills(slots[is_prefill], missing[is_prefill], self._budget - len(decodes))

    def _schedule_prefills(self, slots: LongArray, missing: IntArray, left: int) -> int:
        for slot, num_missing in zip(slots.tolist(), missing.tolist(), strict=True):
            if left <= 0:
                break
            count = min(num_missing, left, self._max_chunk)
            self._steps.add_prefill(slot, count)
            left -= count
        return left

    def _blocked(self) -> WaitReason | None:
        """Why nobody may be admitted in this step, if so."""
        if self._growth.is_short:
            return WaitReason.BLOCKS_IN_FLIGHT
        if self._growth.has_preempted and self._steps.has_rows:
            # A victim of this step would otherwise take back at once what it has just given up.
            return WaitReason.PREEMPTION
        return None

    def _note_admitted(self, admitted: Sequence[Request], output: SchedulerOutput) -> None:
        fresh = {start.request_id: start.num_computed_tokens for start in output.new}
        self._admitted[output.step] = [
            AdmittedRequest(
                request_id=request.request_id,
                num_cached_tokens=fresh[request.request_id],
                scheduled_at=output.scheduled_at,
                client_id=request.client_id,
            )
            for request in admitted
            if request.request_id in fresh
        ]
        self._policy.on_admit(admitted)

    # Updating, in parts

    def _told(
        self,
        output: SchedulerOutput,
        result: ModelRunnerOutput,
        taken: Taken,
        ends: Sequence[FinishedRequest],
        prompt_logprobs: Sequence[PromptLogprobs],
    ) -> EngineCoreOutputs:
        return EngineCoreOutputs(
            request_ids=taken.request_ids,
            num_tokens=taken.num_tokens,
            token_ids=taken.token_ids,
            finished=(*self.take_finished(), *ends),
            admitted=self._admitted.pop(output.step, ()),
            logprobs=taken.logprobs,
            prompt_logprobs=prompt_logprobs,
            pooled=result.pooled,
            finished_kv_transfers=result.finished_kv_transfers,
            stats=self.stats() if self._log_stats else None,
            kv_events=self._kv.take_events(),
            events=self._events.take(),
            num_scheduled_tokens=output.total_num_scheduled_tokens if self._log_stats else 0,
        )

    def _commit(self, slots: LongArray, failed: Mapping[str, str]) -> None:
        """Publish the blocks that this step completed, but for requests that failed: nobody knows what is in theirs."""
        table, size = self._table, self._block_size
        computed = table.num_computed[slots] - table.in_flight[slots, TOKENS]
        full = computed >= table.commit_at[slots]
        if not np.count_nonzero(full):
            return
        slots, computed = slots[full], computed[full]
        table.commit_at[slots] = (computed // size + 1) * size
        for slot, num_computed in zip(slots.tolist(), computed.tolist(), strict=True):
            request = table.requests[slot]
            if request is not None and request.request_id not in failed:
                self._kv.commit(request, num_computed)

    def _step_back(self, output: SchedulerOutput, result: ModelRunnerOutput) -> None:
        """Rows that were to sample and did not compute their last token once more: otherwise they would stand still.

        Before `_commit`, after which a window group no longer holds what that token reads.
        """
        table = self._table
        for slot in output.slots[output.samples & (result.num_sampled == 0)].tolist():
            if table.requests[slot] is not None and not table.in_flight[slot, STEPS]:
                table.service_before[slot] += 1
                table.num_computed[slot] -= 1

    def _restart_odd(self, output: SchedulerOutput, result: ModelRunnerOutput, landed: Landed) -> None:
        """What is in flight builds on one token, the next: where there was none, or several, it is worth nothing."""
        for row, _ in landed.preempted:
            if output.samples[row] and result.num_sampled[row] != 1:
                self._running.drop_steps(int(output.slots[row]))
        for slot in output.slots[output.samples & (result.num_sampled != 1)].tolist():
            request = self._table.requests[slot]
            if request is not None and self._table.in_flight[slot, STEPS]:
                self._growth.restart(request)

    def _step_outcomes(
        self, output: SchedulerOutput, taken: Taken, landed: Landed, ended: set[str]
    ) -> list[StepOutcome]:
        num_new = dict(zip(taken.request_ids, taken.num_tokens.tolist(), strict=True))
        preempted = dict(landed.preempted)
        outcomes = []
        for row, (slot, computed) in enumerate(
            zip(output.slots.tolist(), output.num_scheduled_tokens.tolist(), strict=True)
        ):
            request = preempted.get(row) or self._table.requests[slot]
            if request is not None:
                new = num_new.get(request.request_id, 0)
                is_first = new > 0 and request.num_output_tokens == new
                outcomes.append(StepOutcome(request, computed, new, is_first, request.request_id in ended))
        return outcomes

    # Ends

    def _expire(self) -> None:
        """End what is past its deadline."""
        if self._deadlines and (overdue := self._deadlines.pop_overdue(self._clock.now())):
            self._ended += [_abort_at_deadline(request) for request in overdue]
            self._end(overdue, [FinishReason.ABORT] * len(overdue))

    def _fail(self, request: Request, error: str, counts_as: str) -> None:
        """End a request that can never run, or that the policy refuses."""
        logger.warning("request %s ends with an error: %s", request.request_id, error)
        self._counters.reject(counts_as)
        self._end([request], [FinishReason.ERROR])  # first: when the policy fails here, `add_request` leaves no trace
        self._ended.append(
            FinishedRequest(
                request_id=request.request_id, reason=FinishReason.ERROR, error=error, client_id=request.client_id
            )
        )

    def _end(self, requests: Sequence[Request], reasons: Sequence[FinishReason]) -> None:
        for request in requests:
            del self._requests[request.request_id]
            self._events.entered_or_ended(request)
            if request.status is RequestStatus.RUNNING:
                self._running.leave(request, RequestStatus.FINISHED)
            else:
                self._waiting.remove(request.request_id)
                if not self._running.is_landing(request.request_id):  # or its blocks are freed when it has landed
                    self._kv.free(request)
                request.status = RequestStatus.FINISHED
        self._policy.on_finish(requests, reasons)

    def _warn_of_priority(self, request: EngineCoreRequest) -> None:
        if request.priority and not self._policy.decides and not self._has_warned:
            self._has_warned = True
            logger.warning("priority=%d changes nothing here; scheduler=priority orders by it", request.priority)


def _abort_at_deadline(request: Request) -> FinishedRequest:
    return FinishedRequest(
        request_id=request.request_id, reason=FinishReason.ABORT, stop_reason="deadline", client_id=request.client_id
    )
