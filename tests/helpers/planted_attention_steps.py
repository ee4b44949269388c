"""More attention backends with a fault each: in what they say, read, write, plan and have recorded."""

from __future__ import annotations

import itertools
from dataclasses import replace

import torch
from planted_attention import Attended, Call, Plan, Right, refusals
from tokenyard.interfaces import AttentionBackendContext, AttentionBatch, AttentionLayer, AttentionSpec, KVCacheLayout

# ---- What they say --------------------------------------------------------------------------------------------------


class SupportsAll(Right):
    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return []


class SupportsNothing(Right):
    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return ["not today"]


class RefusesOneSize(Right):
    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return ["no"] if (spec.head_dim, spec.block_size) == (80, 64) else refusals(spec)


class DividesByTheBlock(Right):
    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return refusals(spec) if 4096 % spec.block_size == 0 else ["block size is no power of two"]


class SaysNothing(Right):
    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return ["" for _ in refusals(spec)]


class ChangesItsMind(Right):
    turns = itertools.count()

    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return [f"{reason} ({next(cls.turns)})" for reason in refusals(spec)]


class AcceptsFp8(Right):
    """Whatever the cache shall hold."""

    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        return refusals(replace(spec, kv_cache_dtype="auto"))


class OneBlockMore(Right):
    def kv_cache_layout(self, spec: AttentionSpec, num_blocks: int) -> KVCacheLayout:
        return super().kv_cache_layout(spec, num_blocks + 1)


# ---- What they read and write ---------------------------------------------------------------------------------------


class ReadsWholeBlocks(Right):
    """Gives no weight to what was not written, but 0 times NaN is NaN."""

    def read(self, cache: torch.Tensor, table: list[int], length: int) -> torch.Tensor:
        rows = cache[table].flatten(0, 1)
        return rows[:length] + 0 * rows[length:].sum(0)


class WeakMask(Right):
    """Takes 10000 from the scores of what was not written, which a huge one outweighs."""

    def read(self, cache: torch.Tensor, table: list[int], length: int) -> torch.Tensor:
        self.length = length
        return cache[table].flatten(0, 1).nan_to_num()

    def attend(self, layer: AttentionLayer, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> Attended:
        result, log = super().attend(layer, query, key[: self.length], value[: self.length])
        heads = self.kv_heads(query.shape[1], key.shape[1])
        scores = torch.einsum("qhd,lhd->qhl", query, key[self.length :, heads]) * layer.scale - 10000
        total = torch.logaddexp(log, scores.logsumexp(2))
        more = torch.einsum("qhl,lhd->qhd", (scores - total[..., None]).exp(), value[self.length :, heads])
        return result * (log - total).exp()[..., None] + more, total


class LeftOfTheWindow(Right):
    """Gives no weight to what the window hides, but reads it."""

    def visible(self, layer: AttentionLayer, value: torch.Tensor, num_queries: int) -> torch.Tensor:
        return value


class ReadsTheWholeTable(Right):
    """Gathers the tails of the block tables, too."""

    def plan(self, batch: AttentionBatch) -> Plan:
        return Plan(batch.slot_mapping, batch.block_table.tolist(), batch.query_lens, batch.context_lens)


class ReadsBeforeItWrites(Right):
    """Writes and attends sequence by sequence."""

    def step(self, call: Call) -> None:
        start = 0
        for index, count in enumerate(call.plan.query_lens):
            rows = slice(start, start + count)
            plan = Plan(call.plan.slots[rows], [call.plan.tables[index]], [count], [call.plan.lengths[index]])
            lse = None if call.lse is None else call.lse[rows]
            own = (call.query[rows], call.key[rows], call.value[rows])
            super().step(Call(call.layer, *own, call.kv_cache, plan, call.out[rows], lse))
            start += count


class Offsets32(Right):
    """Counts elements in 32 bits."""

    def write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        size = rows[0].numel()
        offsets = (slots * size).to(torch.int32).long() % cache.numel()
        cache.view(-1, *rows.shape[1:])[offsets // size] = rows


class WritesTheNextSlot(Right):
    """One row more than it has, behind its last one."""

    def write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        flat = cache.flatten(0, 1)
        flat[(slots[-1:] + 1) % len(flat)] = rows[-1:]
        super().write(cache, slots, rows)


class ClearsTheBlock(Right):
    """Clears each block before it writes to it."""

    def write(self, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
        cache[slots // cache.shape[1]] = 0
        super().write(cache, slots, rows)


class RowsInOnePiece(Right):
    """Steps from token to token by heads * head size."""

    def step(self, call: Call) -> None:
        query, key, value = (
            rows.as_strided(rows.shape, torch.empty(rows.shape).stride()) for rows in (call.query, call.key, call.value)
        )
        super().step(replace(call, query=query, key=key, value=value))


class Adds(Right):
    """To what `out` holds."""

    def step(self, call: Call) -> None:
        before = call.out.clone()
        super().step(call)
        call.out += before


class LeavesOutTheLastRow(Right):
    def step(self, call: Call) -> None:
        result = call.out.clone()
        super().step(replace(call, out=result))
        call.out[:-1] = result[:-1]


class LeavesOutALogarithm(Right):
    def step(self, call: Call) -> None:
        lse = None if call.lse is None else call.lse.clone()
        super().step(replace(call, lse=lse))
        if call.lse is not None and lse is not None:
            call.lse[:, 1:] = lse[:, 1:]


class WritesFourRows(Right):
    """Rounds the number of rows up to a multiple of 4."""

    def step(self, call: Call) -> None:
        super().step(call)
        count, shape = len(call.out), call.out.shape[1:]
        call.out.as_strided((-(-count // 4) * 4, *shape), call.out.stride())[count:] = 0


class ScalesTheQuery(Right):
    """In place."""

    def step(self, call: Call) -> None:
        call.query *= call.layer.scale
        super().step(replace(call, layer=replace(call.layer, scale=1.0)))


class ClampsTheTable(Right):
    """In place."""

    def plan(self, batch: AttentionBatch) -> Plan:
        self.table = batch.block_table
        return super().plan(batch)

    def step(self, call: Call) -> None:
        super().step(call)
        self.table.clamp_(min=1)


class PlanClampsTheTable(Right):
    """In place, before any forward."""

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = super().plan(batch)
        batch.block_table.clamp_(min=1)
        return plan


class PlanClampsTheHostsTable(Right):
    def plan(self, batch: AttentionBatch) -> Plan:
        clamp_on_the_host(batch)
        return super().plan(batch)


class PlanShiftsTheSlots(Right):
    """To count slots from 1."""

    def plan(self, batch: AttentionBatch) -> Plan:
        plan = super().plan(batch)
        batch.slot_mapping.add_(1)
        return replace(plan, slots=batch.slot_mapping - 1)


class RecordingClampsTheTable(Right):
    def plan_capture(self, batch: AttentionBatch) -> object:
        batch.block_table.clamp_(min=1)
        return self.plan(batch)


class UpdateClampsTheHostsTable(Right):
    def update_capture(self, plan: object, batch: AttentionBatch) -> None:
        clamp_on_the_host(batch)
        super().update_capture(plan, batch)


def clamp_on_the_host(batch: AttentionBatch) -> None:
    table = batch.host_block_table
    assert table is not None
    table.clip(min=1, out=table)


# ---- Plans and graphs -----------------------------------------------------------------------------------------------


class KeepsItsPlan(Right):
    """Plans once for each list of query lengths."""

    def __init__(self, context: AttentionBackendContext) -> None:
        super().__init__(context)
        self.plans: dict[tuple[int, ...], Plan] = {}

    def plan(self, batch: AttentionBatch) -> Plan:
        new = super().plan(batch)
        old = self.plans.setdefault(tuple(batch.query_lens), new)
        return replace(new, lengths=old.lengths)


class ItsLastPlan(Right):
    """Runs every layer with the plan that was made last."""

    def plan(self, batch: AttentionBatch) -> Plan:
        self.last = super().plan(batch)
        return self.last

    def step(self, call: Call) -> None:
        super().step(replace(call, plan=self.last))


class LengthsOfTheLastPlan(Right):
    """Uses one buffer for the lengths of all plans."""

    def __init__(self, context: AttentionBackendContext) -> None:
        super().__init__(context)
        self.lengths: list[int] = []

    def plan(self, batch: AttentionBatch) -> Plan:
        self.lengths[: batch.num_sequences] = batch.context_lens
        return replace(super().plan(batch), lengths=self.lengths)

    def step(self, call: Call) -> None:
        plan = call.plan
        super().step(replace(call, plan=replace(plan, lengths=plan.lengths[: len(plan.query_lens)])))


class FirstLayersWindow(Right):
    """Keeps the window of the first layer that runs with a plan."""

    def plan(self, batch: AttentionBatch) -> Plan:
        self.window: list[int | None] = []
        return super().plan(batch)

    def step(self, call: Call) -> None:
        self.window.append(call.layer.sliding_window)
        super().step(replace(call, layer=replace(call.layer, sliding_window=self.window[0])))


class NoUpdate(Right):
    """A recording goes on with the lengths and tables that it was made with."""

    def renew(self, plan: Plan, batch: AttentionBatch) -> None:
        return None


class UpdatesOnce(Right):
    """A recording's first replay is right."""

    def renew(self, plan: Plan, batch: AttentionBatch) -> None:
        if plan not in self.updated:
            super().renew(plan, batch)
            self.updated.append(plan)

    def plan_capture(self, batch: AttentionBatch) -> object:
        self.updated: list[Plan] = []
        return self.plan(batch)


class RecordedLength(Right):
    """A recording reads as many tokens as its greatest length has."""

    def renew(self, plan: Plan, batch: AttentionBatch) -> None:
        plan.tables, plan.lengths = batch.block_table.tolist(), [batch.max_seq_len] * len(plan.lengths)
