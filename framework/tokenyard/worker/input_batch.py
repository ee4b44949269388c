"""InputBatch: the persistent batch. What the worker knows of each slot, kept between steps in arrays.

C = slots, T = scheduled tokens of a step, R = rows of a step, B = blocks a sequence can have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from tokenyard.errors import LogitsProcessorError
from tokenyard.kv_cache.block_pool import NULL_BLOCK
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from tokenyard.arrays import IntArray, LongArray
    from tokenyard.interfaces.logits_processor import RowLogitsProcessor
    from tokenyard.scheduler_output import RequestStart, SchedulerOutput

_NO_ROWS: LongArray = np.empty(0, dtype=np.int64)


class SampledRequest(NamedTuple):
    """What sampling must know of the request in a slot; the same for as long as it holds the slot."""

    request_id: str
    params: SamplingParams
    num_prompt_tokens: int
    stop_token_ids: tuple[int, ...]  # not to be sampled before params.min_tokens output tokens
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    processor: RowLogitsProcessor | None = None


class PromptRows(NamedTuple):
    """Prompt tokens at start .. start + N of one row of a step; each follows from the logits of the one before it."""

    row: int  # of the step
    request: SampledRequest
    start: int
    token_ids: IntArray  # [N]


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step, packed: sequence i owns rows query_start[i] : query_start[i + 1] of the T tokens."""

    token_ids: LongArray  # [T]; one below 0 stands for a token that the host does not know yet: see LastTokens
    positions: LongArray  # [T]
    query_start: IntArray  # [R + 1]
    seq_lens: IntArray  # [R] including this step's tokens
    block_tables: tuple[IntArray, ...]  # per KV group [R, most blocks of a row]
    slot_mappings: tuple[LongArray, ...]  # per KV group [T]
    sampled_rows: LongArray  # [rows that sample] index of each one's last token among T
    prompt_rows: LongArray  # [M] index among T of the tokens before those of `prompts`
    prompts: tuple[PromptRows, ...] = ()  # prompt tokens whose log probabilities are asked for: M together


class InputBatch:
    """Grows with the slots that the scheduler names. `version` changes when a slot gets another request.

    `processors` makes the logits processor of a request that enters. A LogitsProcessorError of it is raised again when
    the first token is to be sampled, so that it ends that request alone.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        max_model_len: int,
        block_size: int,
        num_groups: int,
        processors: Callable[[RequestStart], RowLogitsProcessor | None] = lambda start: None,
    ) -> None:
        self.version = 0
        self._processors = processors
        self._block_size = block_size
        max_blocks = -(-(max_model_len + 1) // block_size)  # one token too many is told by name, not by an IndexError
        self.num_groups, self.max_blocks = num_groups, max_blocks  # block tables of a slot, and their width
        self._token_ids = np.zeros((num_slots, max_model_len + 1), dtype=np.int32)  # [C, positions]
        self._tables = [np.full((num_slots, max_blocks), NULL_BLOCK, dtype=np.int32) for _ in range(num_groups)]
        self._requests: list[SampledRequest | None] = [None] * num_slots

    def apply(self, output: SchedulerOutput) -> None:
        """Take in what changed: requests that left, grew or entered."""
        for slot in output.finished:
            self._requests[slot.index] = None
        for update in output.block_table_updates:
            end = update.start + len(update.block_ids)
            self._tables[update.group][update.slot.index, update.start : end] = update.block_ids
        for start in (*output.new, *output.resumed):
            self._enter(start)

    def build(self, output: SchedulerOutput) -> StepInputs:
        """The packed inputs of a step that was applied."""
        counts = output.num_scheduled_tokens
        query_start = np.zeros(len(counts) + 1, dtype=np.int32)
        np.cumsum(counts, out=query_start[1:])
        slots = np.repeat(output.slots, counts)
        offsets = np.repeat(query_start[:-1] - output.num_computed_tokens, counts)
        positions = np.arange(query_start[-1], dtype=np.int64) - offsets
        seq_lens = output.num_computed_tokens + counts
        width = -(-int(seq_lens.max()) // self._block_size)
        prompts = self._prompts(output)
        return StepInputs(
            token_ids=self._token_ids[slots, positions].astype(np.int64),
            positions=positions,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=tuple(table[output.slots, :width] for table in self._tables),
            slot_mappings=self._slot_mappings(slots, positions),
            sampled_rows=(query_start[1:][output.samples] - 1).astype(np.int64),
            prompt_rows=_prompt_rows(prompts, query_start) if prompts else _NO_ROWS,
            prompts=prompts,
        )

    def append(self, slots: LongArray, positions: IntArray, token_ids: IntArray | LongArray) -> None:
        """Remember sampled tokens, or what stands for them meanwhile, as the next inputs of their slots."""
        self._token_ids[slots, positions] = token_ids

    def tokens(self, slot: int, count: int) -> IntArray:
        """[count] the first tokens of a slot, prompt and sampled ones: a view that cannot be written to."""
        tokens = self._token_ids[slot, :count]
        tokens.flags.writeable = False
        return tokens

    def requests(self, slots: LongArray) -> list[SampledRequest]:
        """Whose slots these are; a slot that nobody holds is a bug and raises RuntimeError."""
        found = []
        for slot in slots.tolist():
            request = self._requests[slot]
            if request is None:
                raise RuntimeError(f"slot {slot} is in the step, but no request holds it")
            found.append(request)
        return found

    def _prompts(self, output: SchedulerOutput) -> tuple[PromptRows, ...]:
        """The prompt tokens that a row's logits are about, behind the ones that it computes; the last one's are not."""
        if output.wants_prompt_logprobs is None:
            return ()
        prompts = []
        for row in np.flatnonzero(output.wants_prompt_logprobs).tolist():
            slot, start = int(output.slots[row]), int(output.num_computed_tokens[row]) + 1
            (request,) = self.requests(output.slots[row : row + 1])
            stop = min(start + int(output.num_scheduled_tokens[row]), request.num_prompt_tokens)
            if start < stop:
                prompts.append(PromptRows(row, request, start, self._token_ids[slot, start:stop]))
        return tuple(prompts)

    def _slot_mappings(self, slots: LongArray, positions: LongArray) -> tuple[LongArray, ...]:
        """Where each token's K/V goes, per group."""
        block_index, offsets = np.divmod(positions, self._block_size)
        mappings = []
        for group, table in enumerate(self._tables):
            blocks = table[slots, block_index]
            if not blocks.all():
                row = int(np.flatnonzero(blocks == NULL_BLOCK)[0])
                raise RuntimeError(
                    f"slot {slots[row]} has no block for the K/V of position {positions[row]} in KV group {group}"
                )
            mappings.append(blocks.astype(np.int64) * self._block_size + offsets)
        return tuple(mappings)

    def _enter(self, start: RequestStart) -> None:
        index = start.slot.index
        if not isinstance(start.params, SamplingParams):
            raise TypeError(f"request {start.request_id} pools; this worker samples")
        if index >= len(self._requests):
            self._grow(index + 1)
        self._token_ids[index, : len(start.token_ids)] = start.token_ids
        for table, block_ids in zip(self._tables, start.block_ids, strict=True):
            table[index, : len(block_ids)] = block_ids
            table[index, len(block_ids) :] = NULL_BLOCK  # an earlier owner's blocks are never written to
        self._requests[index] = SampledRequest(
            start.request_id,
            start.params,
            start.num_prompt_tokens,
            start.stop_token_ids,
            start.bad_words_token_ids,
            self._processor(start),
        )
        self.version += 1

    def _processor(self, start: RequestStart) -> RowLogitsProcessor | None:
        try:
            return self._processors(start)
        except LogitsProcessorError as error:
            return _Refusal(error)

    def _grow(self, num_slots: int) -> None:
        extra = max(num_slots, 2 * len(self._requests)) - len(self._requests)
        self._token_ids = np.pad(self._token_ids, ((0, extra), (0, 0)))
        self._tables = [np.pad(table, ((0, extra), (0, 0)), constant_values=NULL_BLOCK) for table in self._tables]
        self._requests.extend([None] * extra)


class _Refusal:
    """Stands for a logits processor that could not be made."""

    def __init__(self, error: LogitsProcessorError) -> None:
        self._error = error

    def __call__(self, logits: torch.Tensor, output_token_ids: IntArray) -> None:
        raise self._error


def _prompt_rows(prompts: tuple[PromptRows, ...], query_start: IntArray) -> LongArray:
    """[M] where among T the tokens are whose logits tell of `prompts`."""
    starts = [int(query_start[rows.row]) for rows in prompts]
    return np.concatenate(
        [np.arange(start, start + len(rows.token_ids)) for start, rows in zip(starts, prompts, strict=True)]
    )
