"""EngineOutputBuilder: takes sampled tokens in, finds what ended, and makes the EngineCoreOutputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenyard.engine_outputs import AdmittedRequest, EngineCoreOutputs, FinishedRequest, SchedulerStats
from tokenyard.request import FinishReason

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.arrays import BoolArray, IntArray
    from tokenyard.runner_output import ModelRunnerOutput
    from tokenyard.scheduler.slots import SlotTable
    from tokenyard.scheduler_output import SchedulerOutput


class Taken(NamedTuple):
    """Tokens that were delivered in a step. N = requests with new tokens."""

    slots: IntArray  # [N]
    num_tokens: IntArray  # [N]
    token_ids: IntArray  # [sum(num_tokens)]
    stopped: BoolArray  # [N] the last token is a stop token
    full: BoolArray  # [N] the request has reached its greatest length


class EngineOutputBuilder:
    """Holds the counters, and the ids of the last batch: a steady batch is named once, not every step."""

    def __init__(self, table: SlotTable, *, counts_prefix_cache: bool) -> None:
        self._table = table
        self._counts_prefix_cache = counts_prefix_cache
        self._named_slots: IntArray = np.empty(0, dtype=np.int32)
        self._named_generations: IntArray = np.empty(0, dtype=np.int32)
        self._names: tuple[str, ...] = ()
        self._num_prompt_tokens = 0
        self._num_generation_tokens = 0
        self._prefix_queries = 0
        self._prefix_hits = 0

    def take_tokens(self, output: SchedulerOutput, result: ModelRunnerOutput, alive: BoolArray) -> Taken:
        """Append each living row's sampled tokens to its request, up to the token that ends it."""
        num_sampled = result.num_sampled
        if len(num_sampled) and int(num_sampled.max()) > 1:
            return self._take_many(output, result, alive)
        wanted = alive[num_sampled == 1]  # of the sampled rows
        slots = output.slots[(num_sampled == 1) & alive]
        tokens = result.token_ids[wanted]
        table = self._table
        table.token_ids[slots, table.num_tokens[slots]] = tokens
        table.num_tokens[slots] += 1
        return Taken(
            slots,
            np.ones(len(slots), dtype=np.int32),
            tokens,
            (table.stop_ids[slots] == tokens[:, None]).any(axis=1),
            table.num_tokens[slots] >= table.max_total_tokens[slots],
        )

    def _take_many(self, output: SchedulerOutput, result: ModelRunnerOutput, alive: BoolArray) -> Taken:
        """Several tokens a row (speculation): cut each row after its first stop token or at its greatest length."""
        table = self._table
        ends = np.cumsum(result.num_sampled)
        slots, kept, stopped = [], [], []
        for row in np.flatnonzero(alive & (result.num_sampled > 0)).tolist():
            slot = int(output.slots[row])
            known = int(table.num_tokens[slot])
            tokens = result.token_ids[ends[row] - result.num_sampled[row] : ends[row]]
            tokens = tokens[: int(table.max_total_tokens[slot]) - known]
            stops = np.flatnonzero(np.isin(tokens, table.stop_ids[slot]))
            tokens = tokens[: stops[0] + 1] if len(stops) else tokens
            table.token_ids[slot, known : known + len(tokens)] = tokens
            table.num_tokens[slot] += len(tokens)
            slots.append(slot)
            kept.append(tokens)
            stopped.append(len(stops) > 0)
        rows = np.array(slots, dtype=np.int32)
        return Taken(
            rows,
            np.array([len(tokens) for tokens in kept], dtype=np.int32),
            np.concatenate(kept) if kept else np.empty(0, dtype=np.int32),
            np.array(stopped, dtype=np.bool_),
            table.num_tokens[rows] >= table.max_total_tokens[rows],
        )

    def build(self, output: SchedulerOutput, result: ModelRunnerOutput, taken: Taken) -> EngineCoreOutputs:
        """The step's results; a request that failed alone is reported as such whatever it sampled."""
        self._num_generation_tokens += len(taken.token_ids)
        failed = [
            FinishedRequest(request_id=request_id, reason=FinishReason.ERROR, error=error)
            for request_id, error in result.errors.items()
        ]
        return EngineCoreOutputs(
            request_ids=self._name(taken.slots),
            num_tokens=taken.num_tokens,
            token_ids=taken.token_ids,
            finished=(*failed, *self._finished(taken, frozenset(result.errors))),
            admitted=self._admitted(output),
            prompt_logprobs=result.prompt_logprobs,
            pooled=result.pooled,
            finished_kv_transfers=result.finished_kv_transfers,
        )

    def stats(
        self,
        *,
        num_running: int,
        num_waiting: int,
        num_steps: int,
        num_preemptions: int,
        num_free_blocks: int,
        num_total_blocks: int,
    ) -> SchedulerStats:
        """The scheduler's gauges with the counters kept here."""
        return SchedulerStats(
            num_running=num_running,
            num_waiting=num_waiting,
            num_steps=num_steps,
            num_preemptions=num_preemptions,
            num_prompt_tokens=self._num_prompt_tokens,
            num_generation_tokens=self._num_generation_tokens,
            prefix_cache_queries=self._prefix_queries,
            prefix_cache_hits=self._prefix_hits,
            num_free_blocks=num_free_blocks,
            num_total_blocks=num_total_blocks,
        )

    def _admitted(self, output: SchedulerOutput) -> Sequence[AdmittedRequest]:
        """Counted once per request, on its first admission: a resumed one was counted when it was new."""
        for start in output.new:
            self._num_prompt_tokens += start.num_prompt_tokens
            if self._counts_prefix_cache:
                self._prefix_queries += start.num_prompt_tokens
                self._prefix_hits += start.num_computed_tokens
        return tuple(
            AdmittedRequest(
                request_id=start.request_id,
                num_cached_tokens=start.num_computed_tokens,
                scheduled_at=output.scheduled_at,
            )
            for start in output.new
        )

    def _finished(self, taken: Taken, failed: frozenset[str]) -> list[FinishedRequest]:
        last_token = np.cumsum(taken.num_tokens) - 1
        finished = []
        for row in np.flatnonzero(taken.stopped | taken.full).tolist():
            request = self._table.requests[int(taken.slots[row])]
            if request is None or request.request_id in failed:
                continue
            stopped = bool(taken.stopped[row])  # a stop token as the last permitted one is a stop, not a length
            token = int(taken.token_ids[last_token[row]])
            finished.append(
                FinishedRequest(
                    request_id=request.request_id,
                    reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
                    stop_reason=token if stopped and token not in request.core.eos_token_ids else None,
                )
            )
        return finished

    def _name(self, slots: IntArray) -> tuple[str, ...]:
        generations = self._table.generation[slots]
        if not np.array_equal(slots, self._named_slots) or not np.array_equal(generations, self._named_generations):
            requests = (self._table.requests[slot] for slot in slots.tolist())
            self._names = tuple(request.request_id for request in requests if request is not None)
            self._named_slots, self._named_generations = slots, generations
        return self._names
