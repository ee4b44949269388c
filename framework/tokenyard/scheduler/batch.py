"""BatchScheduler: continuous batching under one token budget, with chunked prefill, prefix hits and preemption."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.engine_outputs import (
    AdmittedRequest,
    EngineCoreOutputs,
    FinishedRequest,
    RequestEvent,
    SchedulerStats,
    ShadowDecision,
)
from tokenyard.errors import ValidationError
from tokenyard.interfaces.policy import PreemptMode
from tokenyard.interfaces.scheduler import (
    RequestSnapshot,
    RequestStatus,
    Scheduler,
    SchedulerContext,
    SchedulerSnapshot,
    WaitReason,
)
from tokenyard.request import FinishReason
from tokenyard.scheduler.admission import Admission, newly_admitted
from tokenyard.scheduler.counters import Counters
from tokenyard.scheduler.deadlines import Deadlines
from tokenyard.scheduler.events import RequestEvents
from tokenyard.scheduler.growth import BlockGrowth
from tokenyard.scheduler.landing import Landing
from tokenyard.scheduler.limits import limits_of
from tokenyard.scheduler.policy_calls import DECISION_POINTS
from tokenyard.scheduler.predictions import TrueLengths
from tokenyard.scheduler.preemption import Preemptor
from tokenyard.scheduler.request_state import Request
from tokenyard.scheduler.running import RunningBatch
from tokenyard.scheduler.sampled import SampledTokens, Taken
from tokenyard.scheduler.shadow import shadowed_calls
from tokenyard.scheduler.slots import SlotTable
from tokenyard.scheduler.step import StepBuilder
from tokenyard.scheduler.step_latency import step_latency
from tokenyard.scheduler.step_time import StepTime
from tokenyard.scheduler.turns import RunningTurns
from tokenyard.scheduler.view import PolicyView
from tokenyard.scheduler.waiting import WaitingQueue

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.request import EngineCoreRequest
    from tokenyard.runner_output import ModelRunnerOutput, PromptLogprobs
    from tokenyard.scheduler_output import SchedulerOutput

logger = logging.getLogger(__name__)

_BY_ITSELF = (FinishReason.STOP, FinishReason.LENGTH)  # ends that say how long an output was


class BatchScheduler(Scheduler):
    """Order of a step: running decodes, running prefills in admission order, then waiting requests by the policy's key.

    The policy may order both otherwise. The first waiting request that does not fit ends the admission: nobody
    overtakes it. Decoding that lacks a block preempts the policy's victim. Any number of steps may be in flight: a row
    may be scheduled again before its token has arrived, and what a step in flight still names is not given away.
    """

    decision_points = DECISION_POINTS

    def __init__(self, context: SchedulerContext, *, name: str = "batch") -> None:
        config = context.config
        self._kv = context.kv_cache_manager
        self._time = StepTime(context.clock)
        self._block_size, self._log_stats = context.block_size, context.log_stats
        self._plugin_times = context.plugin_times
        self._limits = limits_of(context)
        self._requests: dict[str, Request] = {}
        self._true_lengths = TrueLengths()
        self._policy = shadowed_calls(context, self.decision_points, name)
        # Twice as many as may run: those whose last step is in flight keep theirs. What is not used costs no memory.
        self._table = SlotTable(2 * config.max_num_seqs, context.max_model_len)
        self._steps = StepBuilder(self._table)
        self._waiting = WaitingQueue(by_client=self._policy.window_by_client)
        self._running = RunningBatch(self._table, self._kv, self._steps)
        self._deadlines = Deadlines(self._requests)
        self._sampled = SampledTokens(self._table)
        self._counters = Counters(counts_prefix_cache=context.prefix_caching)
        self._events = RequestEvents(self._time, is_on=self._log_stats)
        self._preemptor = Preemptor(
            PreemptMode(config.preempt_mode),
            kv_cache_manager=self._kv,
            running=self._running,
            waiting=self._waiting,
            policy=self._policy,
            events=self._events,
        )
        self._growth = BlockGrowth(
            table=self._table,
            kv_cache_manager=self._kv,
            running=self._running,
            steps=self._steps,
            preemptor=self._preemptor,
            block_size=self._block_size,
        )
        self._landing = Landing(
            table=self._table,
            kv_cache_manager=self._kv,
            running=self._running,
            preemptor=self._preemptor,
            block_size=self._block_size,
        )
        self._turns = RunningTurns(
            config,
            table=self._table,
            running=self._running,
            steps=self._steps,
            growth=self._growth,
            preemptor=self._preemptor,
            policy=self._policy,
        )
        self._admission = Admission(
            config,
            table=self._table,
            kv_cache_manager=self._kv,
            running=self._running,
            waiting=self._waiting,
            steps=self._steps,
            growth=self._growth,
            preemptor=self._preemptor,
            policy=self._policy,
            counters=self._counters,
            events=self._events,
            time=self._time,
            block_size=self._block_size,
            fail=self._fail,
        )
        self._predictor = None
        if context.make_predictor is not None:
            self._predictor = context.make_predictor(self._true_lengths.true_output_tokens)
        self._policy.use(
            PolicyView(
                time=self._time,
                table=self._table,
                kv_cache_manager=self._kv,
                waiting=self._waiting,
                running=self._running,
                counters=self._counters,
                block_size=self._block_size,
                seed=context.seed,
                predictor=self._predictor,
                latency=step_latency(context, self._table, self._running),
            )
        )
        self._admitted: dict[int, list[AdmittedRequest]] = {}  # by step, until it has landed
        self._ended: list[FinishedRequest] = []  # outside a step, not told yet
        self._has_warned = False
        self._has_overruled = False

    # Requests come and go

    def add_request(self, request: EngineCoreRequest) -> None:
        self._time.read()
        record = Request(request, self._limits.total_length(request), self._limits.min_tokens(request))
        if request.request_id in self._requests or any(end.request_id == request.request_id for end in self._ended):
            raise ValidationError(
                f"request id '{request.request_id}' is in use; give each live request an id of its own",
                parameter="request_id",
                value=request.request_id,
            )
        self._warn_of_priority(request)
        record.core = self._true_lengths.strip(request)
        record.arrival_tokens = self._counters.num_computed_tokens
        try:
            self._requests[request.request_id] = record
            self._policy.on_arrival([record])
            decision = self._policy.admit(record)
            self._admission.queue(record)
        except BaseException:
            self._requests.pop(request.request_id, None)
            self._true_lengths.forget(request.request_id)
            raise
        self._deadlines.add(record)
        if decision.kind == "reject":
            self._admission.reject(record, decision.reason)

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        self._time.read()
        ended = [
            self._requests[request_id] for request_id in dict.fromkeys(request_ids) if request_id in self._requests
        ]
        self._end(ended, [reason] * len(ended))
        return [request.request_id for request in ended]

    def take_finished(self) -> Sequence[FinishedRequest]:
        self._time.read()
        return self._take_ended()

    def take_events(self) -> Sequence[RequestEvent]:
        return self._events.take()

    def take_shadow_decisions(self) -> Sequence[ShadowDecision]:
        return self._policy.take_shadow_decisions()

    def has_requests(self) -> bool:
        return bool(self._requests) or bool(self._ended)

    def pause_admission(self, is_paused: bool) -> None:
        self._waiting.is_paused = is_paused

    def reset_prefix_cache(self) -> bool:
        return self._kv.reset()

    def wake_at(self) -> float | None:
        self._time.read()
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
            num_preemptions=self._preemptor.num_preemptions,
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
            num_paused=len(self._running.paused),
            shadow=self._policy.shadow_stats(),
            plugins=None if self._plugin_times is None else self._plugin_times.stats(is_exact=not self._requests),
        )

    def waiting_snapshot(self, limit: int) -> Sequence[RequestSnapshot]:
        return tuple(self._admission.explain(limit))

    def snapshot(self, limit: int | None = None) -> SchedulerSnapshot:
        return SchedulerSnapshot(
            running=tuple(request.snapshot(None) for request in self._running.requests.values()),
            waiting=tuple(self._admission.explain(limit)),
        )

    # One step

    def schedule(self) -> SchedulerOutput | None:
        self._time.read()
        self._expire()
        output = self._plan()
        if output is None and self._preemptor.displaced and not self._steps.num_in_flight:
            output = self._plan()  # nobody took what they gave up, so they may have it back
        if output is None and self._is_held():
            self._warn_of_overruling()
            self._policy.mute()
            try:
                output = self._plan()
            finally:
                self._policy.unmute()
        return output

    def update_from_output(self, output: SchedulerOutput, result: ModelRunnerOutput) -> EngineCoreOutputs:
        self._time.read()
        landed = self._running.land(output)
        taken = self._sampled.take(output, result, landed)
        num_to_sample = np.count_nonzero(output.samples)
        is_odd = not len(result.token_ids) == num_to_sample == np.count_nonzero(result.num_sampled)
        if is_odd:
            self._landing.step_back(output, result)
        self._landing.commit(output.slots if landed.alive is None else output.slots[landed.alive], result.errors)
        self._counters.num_generation_tokens += len(taken.token_ids)
        num_scheduled = output.total_num_scheduled_tokens
        self._counters.num_computed_tokens += num_scheduled
        prompt_logprobs = self._sampled.prompt_logprobs(output, result, landed)
        ends = self._sampled.ends(output, result, landed, taken, self._requests)
        if self._policy.wants_steps:
            self._policy.on_step(self._landing.outcomes(output, taken, landed, {end.request_id for end in ends}))
        if ends:
            self._end([self._requests[end.request_id] for end in ends], [end.reason for end in ends])
        for row, request in landed.preempted:
            request.attain(int(output.num_scheduled_tokens[row]))
        if is_odd:
            self._landing.restart_odd(output, result, landed)
        self._events.landed(output.step)
        return self._told(output, result, taken, ends, prompt_logprobs, num_scheduled)

    # Scheduling, in parts

    def _plan(self) -> SchedulerOutput | None:
        """A step of what may run by the policy, if anything may."""
        self._policy.begin_step()
        self._preemptor.begin_step()
        self._growth.begin_step()
        left = self._turns.take(somebody_waits=len(self._waiting) > 0)
        admitted = self._admission.admit(left, self._blocked())
        if not self._steps.has_rows:
            return None
        output = self._steps.finish(
            self._time.now(), paused=self._running.paused_slots(), host_transfers=tuple(self._kv.take_transfers())
        )
        self._events.scheduled(output, self._steps.num_prefills, self._table)
        if admitted:
            self._admitted[output.step] = newly_admitted(admitted, output)
            self._policy.on_admit(admitted)
        return output

    def _is_held(self) -> bool:
        """Whether nothing runs, and nobody but the policy may be the reason, without naming a time."""
        if not self._policy.can_hold or not self._requests or self._steps.num_in_flight:
            return False
        moment = self._policy.wake_at()
        return moment is None or moment <= self._time.now()

    def _warn_of_overruling(self) -> None:
        if not self._has_overruled:
            self._has_overruled = True
            logger.warning(
                "scheduling policy %s left everything out of a step, and its wake_at names no later time: steps like "
                "that are made without it",
                self._policy.name,
            )

    def _blocked(self) -> WaitReason | None:
        """Why nobody may be admitted in this step, if so."""
        if self._growth.is_short:
            return WaitReason.BLOCKS_IN_FLIGHT
        if self._growth.has_preempted and self._steps.has_rows:
            # A victim of this step would otherwise take back at once what it has just given up.
            return WaitReason.PREEMPTION
        return None

    # Updating, in parts

    def _told(
        self,
        output: SchedulerOutput,
        result: ModelRunnerOutput,
        taken: Taken,
        ends: Sequence[FinishedRequest],
        prompt_logprobs: Sequence[PromptLogprobs],
        num_scheduled: int,
    ) -> EngineCoreOutputs:
        return EngineCoreOutputs(
            request_ids=taken.request_ids,
            num_tokens=taken.num_tokens,
            token_ids=taken.token_ids,
            finished=(*self._take_ended(), *ends),
            admitted=self._admitted.pop(output.step, ()),
            logprobs=taken.logprobs,
            prompt_logprobs=prompt_logprobs,
            pooled=result.pooled,
            finished_kv_transfers=result.finished_kv_transfers,
            stats=self.stats() if self._log_stats else None,
            kv_events=self._kv.take_events(),
            events=self._events.take(),
            num_scheduled_tokens=num_scheduled,
        )

    # Ends

    def _take_ended(self) -> Sequence[FinishedRequest]:
        self._expire()
        ended, self._ended = self._ended, []
        return ended

    def _expire(self) -> None:
        """End what is past its deadline."""
        if self._deadlines and (overdue := self._deadlines.pop_overdue(self._time.now())):
            self._ended += [_abort_at_deadline(request) for request in overdue]
            self._end(overdue, [FinishReason.ABORT] * len(overdue))

    def _fail(self, request: Request, error: str, counts_as: str) -> None:
        """End a request that can never run, or that the policy refuses."""
        logger.warning("request %s ends with an error: %s", request.request_id, error)
        self._counters.reject(counts_as)
        self._end([request], [FinishReason.ERROR])  # first: when the policy fails here, `add_request` leaves no trace
        self._ended.append(
            FinishedRequest(
                request_id=request.request_id,
                reason=FinishReason.ERROR,
                error=error,
                client_id=request.client_id,
                num_preemptions=request.num_preemptions,
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
                if request.status is RequestStatus.PREEMPTED:
                    self._kv.forget_swapped(request)
                request.status = RequestStatus.FINISHED
        self._policy.on_finish(requests, reasons)
        for request, reason in zip(requests, reasons, strict=True):
            if self._predictor is not None and reason in _BY_ITSELF:
                self._predictor.on_finish(request)
            self._true_lengths.forget(request.request_id)

    def _warn_of_priority(self, request: EngineCoreRequest) -> None:
        if request.priority and not self._policy.decides and not self._has_warned:
            self._has_warned = True
            logger.warning("priority=%d changes nothing here; scheduler=priority orders by it", request.priority)


def _abort_at_deadline(request: Request) -> FinishedRequest:
    return FinishedRequest(
        request_id=request.request_id,
        reason=FinishReason.ABORT,
        stop_reason="deadline",
        client_id=request.client_id,
        num_preemptions=request.num_preemptions,
    )
