"""How long requests take alone: against steps added up one by one, and against the engine itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.config import SchedulerConfig
from tokenyard.experiments.alone_time import AloneTime
from tokenyard.interfaces import LatencyModel, StepLoad


@dataclass
class Model(LatencyModel):
    """Any function, and how often it was asked."""

    seconds: Callable[[StepLoad], float]
    num_asked: int = 0

    def step_seconds(self, load: StepLoad) -> float:
        self.num_asked += 1
        return self.seconds(load)


def linear(load: StepLoad) -> float:
    context = load.num_decode_context_tokens + 3 * load.num_prefill_context_tokens
    return 0.01 + 0.001 * load.num_tokens + 1e-5 * context


def bent(load: StepLoad) -> float:
    """The larger of two straight lines, as of a roofline."""
    return max(0.01, 1e-5 * (load.num_decode_context_tokens + load.num_prefill_context_tokens + load.num_tokens))


def curved(load: StepLoad) -> float:
    return 0.01 + 1e-8 * (load.num_decode_context_tokens + load.num_tokens) ** 1.5


def steps(prompt: int, output: int, chunk: int) -> Iterator[StepLoad]:
    """A row is a decode when it computes the one token that is known last."""
    computed = 0
    while computed < prompt:
        count = min(chunk, prompt - computed)
        if count == 1 and computed:
            yield StepLoad(num_decodes=1, num_decode_context_tokens=computed)
        else:
            yield StepLoad(num_prefills=1, num_prefill_tokens=count, num_prefill_context_tokens=computed)
        computed += count
    for context in range(prompt, prompt + output - 1):
        yield StepLoad(num_decodes=1, num_decode_context_tokens=context)


def one_by_one(function: Callable[[StepLoad], float], prompt: int, output: int, chunk: int) -> float:
    return float(np.sum([function(load) for load in steps(prompt, output, chunk)]))


def scheduler(budget: int = 64, **settings: int | bool) -> SchedulerConfig:
    return SchedulerConfig(max_num_batched_tokens=budget, max_num_seqs=1, **settings)  # type: ignore[arg-type]


def ints(*values: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    return np.array(values, dtype=np.int32)


@pytest.mark.parametrize("function", [linear, bent, curved])
@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(1, 1500), st.integers(1, 1500)), min_size=1, max_size=5))
def test_a_request_alone_takes_its_steps_one_after_another(
    function: Callable[[StepLoad], float], sizes: list[tuple[int, int]]
) -> None:
    alone = AloneTime(Model(function), scheduler())
    prompts, outputs = ints(*(size[0] for size in sizes)), ints(*(size[1] for size in sizes))
    expected = [one_by_one(function, *size, 64) for size in sizes]
    assert alone(prompts, outputs) == pytest.approx(expected, rel=1e-6 if function is curved else 1e-9)


def test_where_the_limits_of_chunks_come_from() -> None:
    def seconds(config: SchedulerConfig) -> float:
        return float(AloneTime(Model(lambda load: 1.0), config)(ints(100), ints(1))[0])

    assert seconds(scheduler(budget=30)) == 4
    assert seconds(scheduler(budget=64, long_prefill_token_threshold=10)) == 10
    assert seconds(scheduler(budget=20, long_prefill_token_threshold=50)) == 5
    assert seconds(scheduler(budget=50, enable_chunked_prefill=False)) == 1


def test_a_constant_step_is_multiplied_and_without_output_there_is_no_time() -> None:
    alone = AloneTime(Model(lambda load: 0.01), scheduler())
    assert alone(ints(1, 1, 64, 65), ints(10, 100, 1, 1)) == pytest.approx([0.1, 1.0, 0.01, 0.02])
    assert np.isnan(alone(ints(5, 5), ints(0, 1))).tolist() == [True, False]
    assert np.isnan(alone(ints(5), ints(0))).all()
    assert len(alone(ints(), ints())) == 0


def test_a_model_is_asked_a_few_times_for_many_requests() -> None:
    model = Model(linear)
    rng = np.random.default_rng(0)
    prompts, outputs = rng.integers(1, 8000, 200_000), rng.integers(1, 8000, 200_000)
    AloneTime(model, scheduler(budget=2048))(prompts.astype(np.int32), outputs.astype(np.int32))
    assert model.num_asked < 8000 + 8000 // 2048 + 2 * (16000 // 256) + 10
