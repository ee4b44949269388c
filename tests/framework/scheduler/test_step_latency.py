"""StepLatency: a latency model as policies ask it."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.errors import PluginError
from tokenyard.interfaces import LatencyModel, StepLoad
from tokenyard.scheduler.slots import SlotTable
from tokenyard.scheduler.step_latency import ModelStepLatency, running_decodes

BUDGET = 64


class Growing(LatencyModel):
    """Any model that grows: a table of seconds by prefill tokens."""

    def __init__(self, table: list[float]) -> None:
        self.table = table
        self.asked = 0

    def step_seconds(self, load: StepLoad) -> float:
        self.asked += 1
        return self.table[load.num_prefill_tokens] + 0.5 * load.num_decodes


def latency(model: LatencyModel, decodes: int = 0) -> ModelStepLatency:
    load = StepLoad(num_decodes=decodes, num_decode_context_tokens=10 * decodes)
    return ModelStepLatency(model, max_num_batched_tokens=BUDGET, running_decodes=lambda: load)


TABLES = st.lists(st.floats(0.01, 2.0), min_size=BUDGET + 1, max_size=BUDGET + 1).map(
    lambda steps: np.cumsum(steps).tolist()
)


@settings(max_examples=200, deadline=None)
@given(TABLES, st.integers(0, BUDGET + 5), st.one_of(st.floats(-1, 150), st.just(math.inf)))
def test_the_budget_is_the_most_tokens_that_a_search_one_by_one_finds(
    table: list[float], decodes: int, seconds: float
) -> None:
    found = latency(Growing(table), decodes).budget_for(seconds)
    prefills = range(max(0, BUDGET - decodes) + 1)
    fitting = [count for count in prefills if table[count] + 0.5 * decodes <= seconds]
    assert found == min(BUDGET, decodes + max(fitting, default=0))


def test_the_same_question_costs_one_search() -> None:
    model = Growing(list(range(1, BUDGET + 2)))
    asked = latency(model, decodes=4)
    assert asked.budget_for(12.0) == asked.budget_for(12.0) == 13
    num_asked = model.asked
    assert num_asked <= math.ceil(math.log2(BUDGET)) + 1
    assert asked.budget_for(13.0) == 14
    assert model.asked > num_asked


def test_decodes_that_come_are_seen_at_once() -> None:
    loads = [StepLoad(num_decodes=2), StepLoad(num_decodes=8)]
    asked = ModelStepLatency(
        Growing(list(range(1, BUDGET + 2))), max_num_batched_tokens=BUDGET, running_decodes=lambda: loads[0]
    )
    assert asked.budget_for(10.0) == 2 + 8
    loads.pop(0)
    assert asked.budget_for(10.0) == 8 + 5


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf, None])
def test_a_model_that_says_no_time_is_named(seconds: float) -> None:
    class Broken(LatencyModel):
        def step_seconds(self, load: StepLoad) -> float:
            return seconds if seconds is not None else math.nan

    with pytest.raises(
        PluginError, match=r"latency model Broken returned .* must be a finite number of seconds above 0"
    ):
        latency(Broken()).predict(StepLoad(num_decodes=1))


def test_no_number_of_seconds_has_no_budget() -> None:
    with pytest.raises(ValueError, match="nan"):
        latency(Growing([1.0] * (BUDGET + 1))).budget_for(math.nan)


def test_a_step_of_nothing_is_never_asked_about() -> None:
    class Strict(LatencyModel):
        def step_seconds(self, load: StepLoad) -> float:
            if not load.num_tokens:
                raise AssertionError("an empty step is no step")
            return 1.0

    assert latency(Strict()).budget_for(0.5) == 0
    assert latency(Strict()).budget_for(1.0) == BUDGET


def test_running_decodes_are_those_whose_one_token_is_missing() -> None:
    table = SlotTable(4, 100)
    table.num_tokens[:] = [20, 20, 20, 20]
    table.max_total_tokens[:] = [30, 30, 30, 21]
    table.num_computed[:] = [19, 8, 20, 20]  # a decode, a prefill, one with its step in flight, one at its end
    table.sampled_in_flight[:] = [0, 0, 1, 1]
    load = running_decodes(table, np.arange(4))
    assert load == StepLoad(num_decodes=2, num_decode_context_tokens=19 + 20)
