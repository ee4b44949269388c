"""WorkerSide: knows from the SchedulerOutputs alone what a worker knows, and checks that they make sense to one.

A step arrives when it is handed to the executor and lands when its result is asked for; in between it is in flight.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.testing.errors import ContractViolation
from tokenyard.testing.memory import NULL_BLOCK, BlockMemory, TokenChain

if TYPE_CHECKING:
    from tokenyard.arrays import IntArray
    from tokenyard.request import PoolingParams
    from tokenyard.sampling_params import SamplingParams
    from tokenyard.scheduler_output import BlockTableUpdate, HostTransfer, RequestStart, SchedulerOutput, Slot


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerLimits:
    """What a worker was launched with."""

    max_num_seqs: int
    max_num_batched_tokens: int
    block_size: int
    num_blocks: int  # usable ones
    group_windows: tuple[int | None, ...] = (None,)
    num_host_blocks: int = 0


@dataclass(slots=True)
class HeldSlot:
    """One owner of a slot."""

    request_id: str
    slot: Slot
    chain: TokenChain  # known tokens: prompt and sampled
    tables: list[list[int]]  # per KV group
    num_computed: int  # steps in flight included
    num_prompt_tokens: int
    params: SamplingParams | PoolingParams
    num_sampling: int = 0  # steps in flight that sample a token for it
    is_gone: bool = False  # it left the batch
    has_ended: bool = False  # its request was told to have ended


@dataclass(slots=True)
class StepRow:
    """One row of a step."""

    held: HeldSlot
    start: int  # first position that is computed
    end: int
    samples: bool
    tables: tuple[IntArray, ...]  # as they were when the step arrived
    wants_prompt_logprobs: bool = False
    sampled: list[int] = field(default_factory=list)  # once the step has landed


@dataclass(slots=True)
class WorkerStep:
    """One step on its way."""

    output: SchedulerOutput
    rows: list[StepRow]


class WorkerSide:
    """`make_chain` gives the empty chain of a request that starts anew: what its content depends on besides tokens."""

    def __init__(self, limits: WorkerLimits, make_chain: Callable[[str], TokenChain]) -> None:
        self.limits = limits
        self.held: dict[int, HeldSlot] = {}  # slot index -> its owner now
        self.in_flight: deque[WorkerStep] = deque()
        self._make_chain = make_chain
        self._memory = BlockMemory(limits.num_blocks, limits.block_size, limits.num_host_blocks)
        self._generations: dict[int, int] = {}
        self._started: set[str] = set()  # ids that were announced as new
        self._last_step: int | None = None

    def forget(self, request_id: str) -> None:
        """The id is given to a new request."""
        self._started.discard(request_id)

    def end(self, request_ids: Iterable[str]) -> None:
        """These requests have ended; rows of theirs may still be in flight."""
        ended = set(request_ids)
        rows = (row for step in self.in_flight for row in step.rows)
        for held in (*self.held.values(), *(row.held for row in rows)):
            held.has_ended |= held.request_id in ended

    @property
    def ids_in_flight(self) -> set[str]:
        """Requests of rows in flight, ended ones included."""
        return {row.held.request_id for step in self.in_flight for row in step.rows}

    def arrive(self, output: SchedulerOutput) -> WorkerStep:
        """A step is handed over."""
        self._check_order(output)
        for slot in output.finished:
            self._finish(slot)
        for update in output.block_table_updates:
            self._append(update)
        for start in output.new:
            self._start(start, is_new=True)
        for start in output.resumed:
            self._start(start, is_new=False)
        for transfer in output.host_transfers:
            self._check_transfer(transfer)
        step = WorkerStep(output, self._rows(output))
        self.in_flight.append(step)
        return step

    def land(self, sample: Callable[[StepRow], Sequence[int]]) -> WorkerStep:
        """The oldest step in flight runs: it copies to and from host memory, writes its K/V, reads, then samples."""
        step = self.in_flight.popleft()
        for transfer in step.output.host_transfers:
            self._memory.transfer(transfer)
        runnable = [row for row in step.rows if row.end <= len(row.held.chain)]
        for row in runnable:
            for group, table in enumerate(row.tables):
                self._memory.write(group, table, row.start, row.held.chain.digests[row.start : row.end])
        for row in runnable:
            self._check_reads(row)
        for row in step.rows:
            if row.samples:
                row.held.num_sampling -= 1
                # A row whose input token never came, because the step before sampled none, has nothing to sample.
                row.sampled = list(sample(row)) if row.end <= len(row.held.chain) else []
        for row in step.rows:
            row.held.chain.extend(row.sampled)
        return step

    # What arrives

    def _check_order(self, output: SchedulerOutput) -> None:
        if self._last_step is not None and output.step <= self._last_step:
            raise ContractViolation("step.order", f"step {output.step} follows step {self._last_step}")
        self._last_step = output.step

    def _finish(self, slot: Slot) -> None:
        held = self.held.get(slot.index)
        if held is None or held.slot != slot:
            raise ContractViolation("slot.finished_once", f"{slot} is reported finished, but held is {_owner(held)}")
        held.is_gone = True
        del self.held[slot.index]

    def _append(self, update: BlockTableUpdate) -> None:
        held = self._owner_of(update.slot.index, update.slot.generation, "a block table update")
        table = held.tables[update.group]
        if update.start != len(table):
            raise ContractViolation(
                "table.append",
                f"blocks of '{held.request_id}' begin at {update.start}, but its table has {len(table)}",
            )
        block_ids = [int(block_id) for block_id in update.block_ids]
        self._check_new_blocks(held, block_ids)
        table.extend(block_ids)

    def _start(self, start: RequestStart, *, is_new: bool) -> None:
        self._check_slot(start)
        name = f"'{start.request_id}'"
        if is_new and start.request_id in self._started:
            raise ContractViolation("request.new_once", f"{name} is announced as new a second time")
        if not is_new and start.request_id not in self._started:
            raise ContractViolation("request.new_once", f"{name} is resumed but was never announced as new")
        if len(start.block_ids) != len(self.limits.group_windows):
            raise ContractViolation(
                "table.groups", f"{name} has {len(start.block_ids)} tables for {len(self.limits.group_windows)} groups"
            )
        if not 0 <= start.num_computed_tokens < len(start.token_ids):
            raise ContractViolation(
                "kv.hit_below_length",
                f"{name} starts with {start.num_computed_tokens} of {len(start.token_ids)} tokens computed",
            )
        self._started.add(start.request_id)
        self._generations[start.slot.index] = start.slot.generation
        chain = self._make_chain(start.request_id)
        chain.extend(start.token_ids.tolist())
        held = HeldSlot(
            start.request_id, start.slot, chain, [], start.num_computed_tokens, start.num_prompt_tokens, start.params
        )
        for block_ids in start.block_ids:
            num_hit = start.num_computed_tokens // self.limits.block_size
            self._check_new_blocks(held, block_ids[num_hit:].tolist())
            held.tables.append(block_ids.tolist())
        self.held[start.slot.index] = held

    def _check_slot(self, start: RequestStart) -> None:
        index, generation = start.slot.index, start.slot.generation
        if index in self.held:
            raise ContractViolation(
                "slot.taken", f"'{start.request_id}' gets slot {index}, which {_owner(self.held[index])} holds"
            )
        if generation <= self._generations.get(index, -1):
            raise ContractViolation(
                "slot.generation", f"slot {index} gets generation {generation} after {self._generations[index]}"
            )
        for step in self.in_flight:
            for row in step.rows:
                if row.held.slot.index == index:
                    raise ContractViolation(
                        "slot.reused_in_flight",
                        f"'{start.request_id}' gets slot {index} while step {step.output.step} still names it for "
                        f"'{row.held.request_id}'",
                    )

    def _check_transfer(self, transfer: HostTransfer) -> None:
        block_ids, host_block_ids = transfer.block_ids.tolist(), transfer.host_block_ids.tolist()
        way = "to" if transfer.to_host else "from"
        where = f"blocks {block_ids} are copied {way} host blocks {host_block_ids} (group {transfer.group})"
        is_known = transfer.group in range(len(self.limits.group_windows))
        is_known &= all(0 < block_id <= self.limits.num_blocks for block_id in block_ids)
        is_known &= all(0 <= block_id < self.limits.num_host_blocks for block_id in host_block_ids)
        targets = host_block_ids if transfer.to_host else block_ids
        if not is_known or len(block_ids) != len(host_block_ids) or len(set(targets)) != len(targets):
            raise ContractViolation("transfer.blocks", f"{where}; there are {self.limits}")
        if not transfer.to_host:
            self._check_unused(block_ids, where)

    def _check_new_blocks(self, held: HeldSlot, block_ids: Sequence[int]) -> None:
        """Blocks that are handed out to be written: of nobody who left while a step of his is in flight."""
        for block_id in block_ids:
            if not 0 <= block_id <= self.limits.num_blocks:
                raise ContractViolation("kv.block_id", f"'{held.request_id}' gets block {block_id}, which is none")
        self._check_unused(block_ids, f"'{held.request_id}' gets blocks {list(block_ids)}")

    def _check_unused(self, block_ids: Sequence[int], what: str) -> None:
        writing = {block_id for block_id in block_ids if block_id != NULL_BLOCK}
        for step in self.in_flight:
            for row in step.rows:
                if row.held.is_gone and (shared := writing & self._reach(row)):
                    raise ContractViolation(
                        "block.reused_in_flight",
                        f"{what} while step {step.output.step} still uses {sorted(shared)} for '{row.held.request_id}'",
                    )

    def _reach(self, row: StepRow) -> set[int]:
        """Blocks that a row writes or reads."""
        return {
            int(block_id)
            for group, table in enumerate(row.tables)
            for block_id in table[self._read_start(group, row.start) // self.limits.block_size :]
        }

    # Rows

    def _rows(self, output: SchedulerOutput) -> list[StepRow]:
        limits, slots, counts = self.limits, output.slots.tolist(), output.num_scheduled_tokens.tolist()
        if not slots:
            raise ContractViolation("step.never_empty", f"step {output.step} has no row")
        if len(set(slots)) != len(slots):
            raise ContractViolation("step.rows_unique", f"step {output.step} names a slot twice: {slots}")
        if len(slots) > limits.max_num_seqs:
            raise ContractViolation(
                "step.max_num_seqs", f"step {output.step} has {len(slots)} rows, max_num_seqs is {limits.max_num_seqs}"
            )
        if min(counts) < 1:
            raise ContractViolation("step.counts", f"step {output.step} schedules {counts} tokens")
        if sum(counts) > limits.max_num_batched_tokens:
            raise ContractViolation(
                "step.budget",
                f"step {output.step} has {sum(counts)} tokens, max_num_batched_tokens is "
                f"{limits.max_num_batched_tokens}",
            )
        return [self._row(output, row) for row in range(len(slots))]

    def _row(self, output: SchedulerOutput, row: int) -> StepRow:
        held = self._owner_of(int(output.slots[row]), int(output.generations[row]), f"step {output.step}")
        start, count = int(output.num_computed_tokens[row]), int(output.num_scheduled_tokens[row])
        known = len(held.chain) + held.num_sampling
        # After a step that sampled nothing the last token is computed again.
        if start != held.num_computed and not known - 1 == start < held.num_computed:
            raise ContractViolation(
                "step.positions_continue",
                f"'{held.request_id}' has {held.num_computed} tokens computed, step {output.step} goes on at {start}",
            )
        num_drafts = 0 if output.num_draft_tokens is None else int(output.num_draft_tokens[row])
        if start + count > known + num_drafts:
            raise ContractViolation(
                "step.tokens_known",
                f"step {output.step} computes {start + count} tokens of '{held.request_id}', {known} are known",
            )
        samples = bool(output.samples[row])
        if samples != (start + count == known + num_drafts):
            raise ContractViolation(
                "step.samples",
                f"step {output.step} computes '{held.request_id}' up to {start + count} of {known} known tokens with "
                f"samples={samples}",
            )
        self._check_tables(held, start, start + count)
        held.num_computed = start + count
        held.num_sampling += samples
        tables = tuple(np.array(table, dtype=np.int32) for table in held.tables)
        wants = output.wants_prompt_logprobs is not None and bool(output.wants_prompt_logprobs[row])
        return StepRow(held, start, start + count, samples, tables, wants)

    def _check_tables(self, held: HeldSlot, start: int, end: int) -> None:
        size = self.limits.block_size
        for group, table in enumerate(held.tables):
            if len(table) * size < end:
                raise ContractViolation(
                    "table.covers_step",
                    f"'{held.request_id}' computes up to token {end}, its {len(table)} blocks of {size} hold "
                    f"{len(table) * size}",
                )
            first = self._read_start(group, start) // size
            if NULL_BLOCK in table[first : -(-end // size)]:
                raise ContractViolation(
                    "kv.null_block", f"'{held.request_id}' needs blocks from {first} on, its table is {table}"
                )

    def _check_reads(self, row: StepRow) -> None:
        for group, table in enumerate(row.tables):
            first = self._read_start(group, row.start)
            wrong = self._memory.first_wrong(group, table, first, row.held.chain.digests[: row.end])
            if wrong is not None:
                block_id = table[wrong // self.limits.block_size]
                raise ContractViolation(
                    "kv.content",
                    f"'{row.held.request_id}' reads position {wrong} from block {block_id} (group {group}), which has "
                    "the K/V of other tokens, or of none",
                )

    def _read_start(self, group: int, query: int) -> int:
        """The first position that a query at `query` reads."""
        window = self.limits.group_windows[group]
        return 0 if window is None else max(0, query - window + 1)

    def _owner_of(self, index: int, generation: int, where: str) -> HeldSlot:
        held = self.held.get(index)
        if held is None or held.slot.generation != generation:
            raise ContractViolation(
                "step.only_live", f"{where} names slot {index} (generation {generation}), but held is {_owner(held)}"
            )
        return held


def _owner(held: HeldSlot | None) -> str:
    return "nothing" if held is None else f"'{held.request_id}' ({held.slot})"
