"""StepLatency for policies: a latency model, and the steps that fit a time."""

from __future__ import annotations

import math
from bisect import bisect_right
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.errors import PluginError
from tokenyard.interfaces.latency import StepLoad

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenyard.arrays import LongArray
    from tokenyard.interfaces.latency import LatencyModel
    from tokenyard.interfaces.scheduler import SchedulerContext
    from tokenyard.scheduler.running import RunningBatch
    from tokenyard.scheduler.slots import SlotTable


class ModelStepLatency:
    """Satisfies `tokenyard.interfaces.StepLatency`.

    `running_decodes` tells the decodes of the moment, as a load without prefills.
    """

    def __init__(
        self, model: LatencyModel, *, max_num_batched_tokens: int, running_decodes: Callable[[], StepLoad]
    ) -> None:
        self._model = model
        self._max_tokens = max_num_batched_tokens
        self._running_decodes = running_decodes
        self._asked: tuple[StepLoad, float] | None = None  # of the answer below: a step asks the same more than once
        self._answer = 0

    def predict(self, load: StepLoad) -> float:
        """Raises PluginError when the model says what is no time."""
        seconds = self._model.step_seconds(load)
        if not 0 < seconds < math.inf:  # also refuses NaN
            raise PluginError(
                f"latency model {type(self._model).__name__} returned {seconds!r} for {load}; step_seconds must be a "
                "finite number of seconds above 0"
            )
        return seconds

    def budget_for(self, seconds: float) -> int:
        """A binary search, since a step of more prefill tokens never takes less."""
        if math.isnan(seconds):
            raise ValueError("budget_for takes a number of seconds; got nan")
        decodes = self._running_decodes()
        if self._asked != (decodes, seconds):
            self._answer = self._search(decodes, seconds)
            self._asked = (decodes, seconds)
        return self._answer

    def _search(self, decodes: StepLoad, seconds: float) -> int:
        def of_prefill_tokens(count: int) -> float:
            return self.predict(decodes._replace(num_prefills=min(1, count), num_prefill_tokens=count))

        room = max(0, self._max_tokens - decodes.num_decodes)
        # Of prefills alone an empty step is no step, and no model need know its time.
        least = 0 if decodes.num_decodes else 1
        fitting = bisect_right(range(least, room + 1), seconds, key=of_prefill_tokens) + least - 1
        return min(decodes.num_decodes + max(0, fitting), self._max_tokens)


def step_latency(context: SchedulerContext, table: SlotTable, running: RunningBatch) -> ModelStepLatency | None:
    """What policies get of a scheduler's latency model; None where it has none."""
    if context.latency is None:
        return None
    return ModelStepLatency(
        context.latency,
        max_num_batched_tokens=context.config.max_num_batched_tokens,
        running_decodes=lambda: running_decodes(table, running.active_slots()),
    )


def running_decodes(table: SlotTable, slots: LongArray) -> StepLoad:
    """Those of `slots` whose next step is a decode, and the tokens whose K/V they will read."""
    known = table.num_tokens[slots] + table.sampled_in_flight[slots]
    computed = table.num_computed[slots]
    is_decode = (known - computed == 1) & (known < table.max_total_tokens[slots])
    return StepLoad(
        num_decodes=int(np.count_nonzero(is_decode)), num_decode_context_tokens=int(computed[is_decode].sum())
    )


def no_latency_model() -> PluginError:
    """The error for a policy that asks where no latency model is configured."""
    return PluginError(
        "the scheduling policy asks how long a step takes, and no latency model is configured; set latency=linear or "
        "latency=constant with its times, or choose another policy"
    )
