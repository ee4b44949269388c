"""SampledTokens: takes a step's tokens in and finds which requests they end."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenyard.engine_outputs import FinishedRequest
from tokenyard.logprob_rows import of_kept_tokens
from tokenyard.request import FinishReason
from tokenyard.scheduler.prompt_logprobs import undelivered
from tokenyard.scheduler.step import NO_SLOTS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenyard.arrays import BoolArray, IntArray, LongArray
    from tokenyard.runner_output import Logprobs, ModelRunnerOutput, PromptLogprobs
    from tokenyard.scheduler.request_state import Request
    from tokenyard.scheduler.running import Landed
    from tokenyard.scheduler.slots import SlotTable
    from tokenyard.scheduler_output import SchedulerOutput


class Taken(NamedTuple):
    """Tokens that were delivered in a step. N = requests with new tokens."""

    request_ids: tuple[str, ...]  # [N]
    num_tokens: IntArray  # [N]
    token_ids: IntArray  # [sum(num_tokens)]
    logprobs: Logprobs | None  # of some of token_ids
    stopped: BoolArray | None  # [N] the last token is a stop token; None = no row's is
    full: BoolArray  # [N] the request has reached its greatest length


class SampledTokens:
    """Remembers the ids of the last batch: a steady batch is named once, not every step."""

    def __init__(self, table: SlotTable) -> None:
        self._table = table
        self._named_slots = NO_SLOTS
        self._names: tuple[str, ...] = ()
        self._one_each: IntArray = np.empty(0, dtype=np.int32)

    def take(self, output: SchedulerOutput, result: ModelRunnerOutput, landed: Landed) -> Taken:
        """Append each row's sampled tokens to its request, up to the token that ends it."""
        slots, tokens, logprobs, alive = output.slots, result.token_ids, result.logprobs, landed.alive
        num_sampling = np.count_nonzero(result.num_sampled)
        if landed.preempted or len(tokens) > num_sampling:
            return self._take_row_by_row(output, result, landed)
        if alive is not None or num_sampling < len(slots):
            sampled = result.num_sampled == 1
            slots = slots[sampled] if alive is None else slots[sampled & alive]
            if alive is not None:
                kept = alive[sampled]
                tokens = tokens[kept]
                logprobs = logprobs and of_kept_tokens(logprobs, kept)
        table = self._table
        position = table.num_tokens[slots]
        length = position + 1
        table.token_ids[slots, position] = tokens
        table.num_tokens[slots] = length
        stopped = None
        if table.num_with_stop_ids:
            stopped = (table.stop_ids[slots] == tokens[:, None]).any(axis=1)
            stopped &= length >= table.min_stop_tokens[slots]
        full = length >= table.max_total_tokens[slots]
        return Taken(self._names_of(slots), self._ones(len(slots)), tokens, logprobs, stopped, full)

    def ends(
        self,
        output: SchedulerOutput,
        result: ModelRunnerOutput,
        landed: Landed,
        taken: Taken,
        requests: Mapping[str, Request],
    ) -> list[FinishedRequest]:
        """What the step ended among the live `requests`; one that failed alone ends so, whatever it sampled."""
        ended = [
            FinishedRequest(
                request_id=request.request_id,
                reason=FinishReason.ERROR,
                error=result.errors[request.request_id],
                client_id=request.client_id,
                num_preemptions=request.num_preemptions,
            )
            for request in (self._rows_requests(output, landed) if result.errors else ())
            if request.request_id in result.errors
        ]
        is_end = taken.full if taken.stopped is None else taken.full | taken.stopped
        if not np.count_nonzero(is_end):
            return ended
        last_token = taken.num_tokens.cumsum() - 1
        for row in np.flatnonzero(is_end).tolist():
            request = requests[taken.request_ids[row]]
            if request.request_id not in result.errors:
                # A stop token as the last permitted one is a stop, not a length.
                is_stop = taken.stopped is not None and bool(taken.stopped[row])
                ended.append(_end_of(request, int(taken.token_ids[last_token[row]]), is_stop))
        return ended

    def prompt_logprobs(
        self, output: SchedulerOutput, result: ModelRunnerOutput, landed: Landed
    ) -> Sequence[PromptLogprobs]:
        """What the step computed of prompts, for requests that are still there, did not fail and do not have it."""
        if not result.prompt_logprobs:
            return ()
        requests = self._rows_requests(output, landed)
        return undelivered(
            result.prompt_logprobs, (request for request in requests if request.request_id not in result.errors)
        )

    def _rows_requests(self, output: SchedulerOutput, landed: Landed) -> list[Request]:
        """The requests of a step that are still there. An id alone may name a later request by now."""
        running = (self._table.requests[slot] for slot in output.slots.tolist())
        return [*(request for request in running if request is not None), *(request for _, request in landed.preempted)]

    def _take_row_by_row(self, output: SchedulerOutput, result: ModelRunnerOutput, landed: Landed) -> Taken:
        """Rows with several tokens (speculation), or of requests that were preempted meanwhile."""
        waiting = dict(landed.preempted)
        ends = np.cumsum(result.num_sampled)
        kept = np.zeros(len(result.token_ids), dtype=np.bool_)
        taken: list[tuple[Request, IntArray, bool]] = []
        for row in np.flatnonzero(result.num_sampled).tolist():
            request = waiting.get(row) or self._table.requests[int(output.slots[row])]
            if request is not None:
                start = ends[row] - result.num_sampled[row]
                tokens, is_stop = _until_end(request, result.token_ids[start : ends[row]])
                kept[start : start + len(tokens)] = True
                request.append(tokens)
                taken.append((request, tokens, is_stop))
        return Taken(
            tuple(request.request_id for request, _, _ in taken),
            np.array([len(tokens) for _, tokens, _ in taken], dtype=np.int32),
            result.token_ids[kept],
            result.logprobs and of_kept_tokens(result.logprobs, kept),
            np.array([is_stop for _, _, is_stop in taken], dtype=np.bool_),
            np.array([request.num_tokens >= request.max_total_tokens for request, _, _ in taken], dtype=np.bool_),
        )

    def _names_of(self, slots: LongArray) -> tuple[str, ...]:
        """A batch that did not change has the same array of slots."""
        if slots is not self._named_slots:
            self._names = tuple(self._table.request_ids[slots].tolist())
            self._named_slots = slots
        return self._names

    def _ones(self, count: int) -> IntArray:
        if count > len(self._one_each):
            self._one_each = np.ones(count, dtype=np.int32)
            self._one_each.flags.writeable = False  # it is handed out in more than one output
        return self._one_each[:count]


def _until_end(request: Request, tokens: IntArray) -> tuple[IntArray, bool]:
    """The tokens up to the one that ends the request, and whether that is a stop token."""
    known = request.num_tokens
    tokens = tokens[: request.max_total_tokens - known]
    counts_from = max(0, request.min_stop_tokens - known - 1)  # index of the first token that may stop
    stops = np.flatnonzero(np.isin(tokens[counts_from:], request.core.stop_token_ids))
    if not len(stops):
        return tokens, False
    return tokens[: counts_from + int(stops[0]) + 1], True


def _end_of(request: Request, last_token: int, is_stop: bool) -> FinishedRequest:
    return FinishedRequest(
        request_id=request.request_id,
        reason=FinishReason.STOP if is_stop else FinishReason.LENGTH,
        stop_reason=last_token if is_stop and last_token not in request.core.eos_token_ids else None,
        client_id=request.client_id,
        num_preemptions=request.num_preemptions,
    )
