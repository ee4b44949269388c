"""SchedulerOutput: what one engine step asks an executor to run.

It is a self-contained columnar delta: nothing in it changes later (an array that several steps share is read-only), and
it names only what the worker does not know yet. It carries no input token that is still in flight: the worker keeps the
tokens it sampled.

A *slot* is a row of the worker's persistent batch, named by (index, generation): the generation grows each time the
index is given to another request, so that a late message about an earlier owner is recognised.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from tokenyard.arrays import BoolArray, IntArray, LongArray
    from tokenyard.request import PoolingParams
    from tokenyard.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Slot:
    """A row of the persistent batch and which of its successive owners is meant."""

    index: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestStart:
    """A request that enters the batch, new or resumed after a preemption: everything the worker must know of it."""

    request_id: str
    slot: Slot
    token_ids: IntArray  # [num_tokens] prompt and, when resumed, all tokens generated so far
    num_prompt_tokens: int
    num_computed_tokens: int  # prefix-cache hits: K/V of these tokens is in the blocks already
    block_ids: tuple[IntArray, ...]  # a block table per KV group: [num_blocks]
    params: SamplingParams | PoolingParams
    lora_name: str | None = None
    stop_token_ids: tuple[int, ...] = ()  # not to be sampled before params.min_tokens
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()  # sequences that must not be completed (since API 1.3)


class BlockTableUpdate(NamedTuple):
    """Blocks appended to the table of a request that was in the batch already."""

    slot: Slot
    group: int  # KV group
    start: int  # index in the block table of the first new block
    block_ids: IntArray  # [num_new_blocks]


class BlockCopy(NamedTuple):
    """A block to copy before the step runs."""

    source: int
    target: int
    group: int = 0  # KV group


class HostTransfer(NamedTuple):
    """Blocks to copy between the device and host memory before the step runs (since API 1.6)."""

    block_ids: IntArray  # [N] on the device
    host_block_ids: IntArray  # [N] from 0, below KVCachePlan.num_host_blocks
    to_host: bool
    group: int = 0  # KV group


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerOutput:
    """One step. R = rows = requests that run in it; arrays of length R are in row order."""

    step: int
    scheduled_at: float = 0.0  # engine-clock seconds
    new: Sequence[RequestStart] = ()
    resumed: Sequence[RequestStart] = ()
    slots: LongArray  # [R] slot indices
    generations: IntArray  # [R]
    num_computed_tokens: IntArray  # [R] before the step; counts tokens of steps still in flight
    num_scheduled_tokens: IntArray  # [R] >= 1
    samples: BoolArray  # [R] the row's last token is its last known one, so a token is sampled
    num_draft_tokens: IntArray | None = None  # [R] speculative tokens among the scheduled; None = none
    draft_token_ids: IntArray | None = None  # [sum(num_draft_tokens)] ragged; None = the worker has them
    lora_ids: IntArray | None = None  # [R] adapter of the row, 0 = none; None = no row has one
    wants_prompt_logprobs: BoolArray | None = None  # [R] of the prompt tokens that the step computes; None = none
    block_table_updates: Sequence[BlockTableUpdate] = ()
    finished: Sequence[Slot] = ()  # slots that are free once this step is done
    paused: Sequence[Slot] = ()  # slots that keep their K/V but do not run
    block_copies: Sequence[BlockCopy] = ()
    kv_transfers: Sequence[object] = ()  # reserved for KV connectors; no built-in fills it
    host_transfers: Sequence[HostTransfer] = ()  # made in this order, before block_copies (since API 1.6)

    @property
    def num_rows(self) -> int:
        return len(self.slots)

    @property
    def total_num_scheduled_tokens(self) -> int:
        return int(self.num_scheduled_tokens.sum())
