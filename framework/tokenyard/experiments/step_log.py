"""StepLog: sums over the steps of a run, and the steps themselves where they are wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.experiments.records import RunTotals, StepTable
from tokenyard.interfaces.kv_cache import NO_BLOCKS
from tokenyard.interfaces.observer import Observer

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.interfaces.kv_cache import KVCacheManager
    from tokenyard.scheduler_output import SchedulerOutput


class StepLog(Observer):
    """`num_open` tells how many requests have arrived and not ended; `budget` is scheduler.max_num_batched_tokens."""

    def __init__(self, budget: int, num_open: Callable[[], int], *, keeps_steps: bool) -> None:
        self._budget = budget
        self._num_open = num_open
        self._kv: KVCacheManager | None = None
        self._rows: list[tuple[float, float, int, int, int, int, int]] | None = [] if keeps_steps else None
        self._num_steps = self._computed = self._rows_run = 0
        self._last_end = -np.inf
        self._busy = self._kv_seconds = 0.0
        self._most_used = 0

    def watch(self, kv_cache_manager: KVCacheManager) -> None:
        """Whose blocks are counted; before the first step."""
        self._kv = kv_cache_manager

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        free, total = NO_BLOCKS if self._kv is None else self._kv.usage
        num_tokens, num_rows = result.num_scheduled_tokens, len(output.slots)
        begin = max(output.scheduled_at, self._last_end)  # under overlap it was scheduled while another ran
        seconds, used = now - begin, total - free
        self._last_end = now
        self._num_steps += 1
        self._computed += num_tokens
        self._rows_run += num_rows
        self._busy += seconds
        self._kv_seconds += seconds * used
        self._most_used = max(self._most_used, used)
        if self._rows is not None:
            num_decodes = int(np.count_nonzero(output.samples & (output.num_scheduled_tokens == 1)))
            waiting = self._num_open() - num_rows
            self._rows.append((begin, now, num_rows, waiting, num_tokens - num_decodes, num_decodes, used))

    def totals(self, num_preemptions: int) -> RunTotals:
        steps, total = self._num_steps, (NO_BLOCKS if self._kv is None else self._kv.usage).num_total_blocks
        has_run = self._busy > 0 and total > 0
        return RunTotals(
            num_steps=steps,
            num_computed_tokens=self._computed,
            num_preemptions=num_preemptions,
            busy_seconds=self._busy,
            mean_kv_usage=self._kv_seconds / self._busy / total if has_run else 0.0,
            max_kv_usage=self._most_used / total if total else 0.0,
            mean_batch_size=self._rows_run / steps if steps else 0.0,
            mean_budget_usage=self._computed / steps / self._budget if steps else 0.0,
            scheduler_seconds=None,
        )

    def steps(self) -> StepTable | None:
        if self._rows is None:
            return None
        columns = list(zip(*self._rows, strict=True)) or [()] * 7
        start, end, running, waiting, prefill, decode, used = columns
        return StepTable(
            start=np.array(start, dtype=np.float64),
            end=np.array(end, dtype=np.float64),
            running=np.array(running, dtype=np.int32),
            waiting=np.array(waiting, dtype=np.int32),
            prefill_tokens=np.array(prefill, dtype=np.int32),
            decode_tokens=np.array(decode, dtype=np.int32),
            used_blocks=np.array(used, dtype=np.int32),
        )
