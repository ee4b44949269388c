"""InputBatch: the persistent batch. What the worker knows of each slot, kept between steps in arrays.

C = slots, T = scheduled tokens of a step, R = rows of a step, B = blocks a sequence can have.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.kv_cache.block_pool import NULL_BLOCK
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray, LongArray
    from tokenyard.scheduler_output import RequestStart, SchedulerOutput


@dataclass(frozen=True, slots=True, kw_only=True)
class StepInputs:
    """One step, packed: sequence i owns rows query_start[i] : query_start[i + 1] of the T tokens."""

    token_ids: LongArray  # [T]
    positions: LongArray  # [T]
    query_start: IntArray  # [R + 1]
    seq_lens: IntArray  # [R] including this step's tokens
    block_tables: tuple[IntArray, ...]  # per KV group [R, most blocks of a row]
    slot_mappings: tuple[LongArray, ...]  # per KV group [T]
    logits_rows: LongArray  # [rows that sample] index of each one's last token among T


class InputBatch:
    """Grows with the slots that the scheduler names."""

    def __init__(self, *, num_slots: int, max_model_len: int, block_size: int, num_groups: int) -> None:
        self._block_size = block_size
        self._max_blocks = -(-max_model_len // block_size)
        self._token_ids = np.zeros((num_slots, max_model_len + 1), dtype=np.int32)  # [C, positions]
        self._tables = [np.full((num_slots, self._max_blocks), NULL_BLOCK, dtype=np.int32) for _ in range(num_groups)]
        self._params: list[SamplingParams | None] = [None] * num_slots
        self._request_ids = [""] * num_slots

    def apply(self, output: SchedulerOutput) -> None:
        """Take in what changed: requests that left, grew or entered."""
        for slot in output.finished:
            self._params[slot.index] = None
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
        return StepInputs(
            token_ids=self._token_ids[slots, positions].astype(np.int64),
            positions=positions,
            query_start=query_start,
            seq_lens=seq_lens,
            block_tables=tuple(table[output.slots, :width] for table in self._tables),
            slot_mappings=tuple(self._slot_mapping(table, slots, positions) for table in self._tables),
            logits_rows=(query_start[1:][output.samples] - 1).astype(np.int64),
        )

    def append(self, slots: IntArray, positions: IntArray, token_ids: IntArray) -> None:
        """Remember sampled tokens as the next inputs of their slots."""
        self._token_ids[slots, positions] = token_ids

    def sampling_params(self, slots: IntArray) -> list[SamplingParams]:
        """Parameters of rows that sample."""
        found = [self._params[slot] for slot in slots.tolist()]
        return [params for params in found if params is not None]

    def request_ids(self, slots: IntArray) -> list[str]:
        """Whose slots these are."""
        return [self._request_ids[slot] for slot in slots.tolist()]

    def _slot_mapping(self, table: IntArray, slots: IntArray, positions: LongArray) -> LongArray:
        blocks = table[slots, positions // self._block_size].astype(np.int64)
        mapping: LongArray = blocks * self._block_size + positions % self._block_size
        return mapping

    def _enter(self, start: RequestStart) -> None:
        index = start.slot.index
        if index >= len(self._params):
            self._grow(index + 1)
        self._token_ids[index, : len(start.token_ids)] = start.token_ids
        for table, block_ids in zip(self._tables, start.block_ids, strict=True):
            table[index, : len(block_ids)] = block_ids
        if not isinstance(start.params, SamplingParams):
            raise TypeError(f"request {start.request_id} pools; this worker samples")
        self._params[index] = start.params
        self._request_ids[index] = start.request_id

    def _grow(self, num_slots: int) -> None:
        extra = max(num_slots, 2 * len(self._params)) - len(self._params)
        self._token_ids = np.pad(self._token_ids, ((0, extra), (0, 0)))
        self._tables = [np.pad(table, ((0, extra), (0, 0)), constant_values=NULL_BLOCK) for table in self._tables]
        self._params.extend([None] * extra)
        self._request_ids.extend([""] * extra)
