"""DecodeGraphs: a step replayed from a graph has the tokens of one that was launched kernel by kernel."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import window_models
from hypothesis import given
from hypothesis import strategies as st
from late_device import CPU, CallingRecorder, LateCalls, RecordableBackend
from runner_steps import GREEDY, MAX_MODEL_LEN, Steps
from tokenyard.sampling_params import SamplingParams
from tokenyard.worker.decode_graphs import default_sizes, pad_decodes
from tokenyard.worker.input_batch import StepInputs
from tokenyard.worker.stream import HostStream, QueuedStream
from window_models import prompt_of


def recorded(folder: Path, sizes: tuple[int, ...], *, is_late: bool = False) -> tuple[Steps, CallingRecorder]:
    stream = QueuedStream(CPU, LateCalls()) if is_late else HostStream()
    steps, recorder = Steps(folder, stream=stream, backend_type=RecordableBackend), CallingRecorder()
    steps.runner.record_graphs(recorder, sizes, MAX_MODEL_LEN)
    return steps, recorder


PROMPTS = [prompt_of(length, seed=length) for length in (3, 17, 30, 8, 1, 11, 25)]


@pytest.mark.parametrize("family", window_models.FAMILIES)
@pytest.mark.parametrize("is_late", [False, True], ids=["waiting", "running ahead"])
def test_tokens_are_those_of_an_eager_run_with_windows_sinks_and_several_kv_groups(
    family: str, is_late: bool, window_model: Callable[[str], Path]
) -> None:
    folder = window_model(family)
    expected = Steps(folder).run(PROMPTS, 12)
    steps, recorder = recorded(folder, (1, 2, 4, 8), is_late=is_late)
    assert steps.run(PROMPTS, 12, depth=2 if is_late else 1) == expected
    assert recorder.num_replays == 11


def test_every_number_of_rows_padded_or_not_gives_the_tokens_of_an_eager_run(tiny_llama_dir: Path) -> None:
    expected = [Steps(tiny_llama_dir).run([prompt], 6)[0] for prompt in PROMPTS]
    for count in range(1, len(PROMPTS) + 1):
        steps, recorder = recorded(tiny_llama_dir, (2, 4, 7))
        assert steps.run(PROMPTS[:count], 6) == expected[:count]
        assert [graph.num_replays for graph in recorder.graphs] == [  # of 7, 4 and 2 rows: the largest is first
            5 * (count > 4),
            5 * (2 < count <= 4),
            5 * (count <= 2),
        ]


def test_a_row_does_not_depend_on_what_an_earlier_step_left_in_the_padded_rows(tiny_llama_dir: Path) -> None:
    """A larger batch runs in between: its tokens, lengths and blocks are in the tensors that the padding covers."""
    expected = Steps(tiny_llama_dir).run(PROMPTS[:1], 9)[0]
    steps, _ = recorded(tiny_llama_dir, (4,))
    for prompt in PROMPTS[:4]:
        steps.add(prompt)
    found = [steps.step({0: len(PROMPTS[0])}).result().token_ids[0]]
    steps.step({index: len(PROMPTS[index]) for index in (1, 2, 3)}).result()
    for turn in range(8):
        counts = dict.fromkeys(range(4), 1) if turn % 2 else {0: 1}
        found.append(steps.step(counts).result().token_ids[0])
    assert found == expected


def test_padded_rows_write_into_the_null_block_alone(tiny_llama_dir: Path) -> None:
    steps, _ = recorded(tiny_llama_dir, (8,))
    steps.run([PROMPTS[0]], 4)
    own = set(steps.blocks_of(0, 0)[:2].tolist())
    for key, value in steps.caches:
        written = {int(block) for block in (~key.isnan()).flatten(1).any(1).nonzero()}
        assert written == {0, *own}
        assert torch.isfinite(value[0]).all()


def test_steps_that_are_not_all_decodes_or_too_many_or_that_ask_for_the_prompt_run_without_a_graph(
    tiny_llama_dir: Path,
) -> None:
    expected, plain = Steps(tiny_llama_dir).run(PROMPTS, 6, chunk=5), Steps(tiny_llama_dir)
    steps, recorder = recorded(tiny_llama_dir, (2, 4))
    assert steps.run(PROMPTS, 6, chunk=5) == expected
    num_replays = sum(len(counts) <= 4 and set(counts) == {1} for counts in steps.history)
    assert recorder.num_replays == num_replays > 0
    asks = SamplingParams(temperature=0, prompt_logprobs=0)
    results = []
    for one in (steps, plain):
        request = one.add(PROMPTS[0], asks)
        one.step({request: 1}, [True]).result()
        results.append(one.step({request: 1}, [True]).result().prompt_logprobs[0].logprobs)
    assert recorder.num_replays == num_replays
    np.testing.assert_array_equal(results[0].token_ids, results[1].token_ids)


def test_rows_of_one_token_that_do_not_sample_are_replayed_too(tiny_llama_dir: Path) -> None:
    prompts = [PROMPTS[1], PROMPTS[0]]  # the first is still being computed when the second samples
    expected = Steps(tiny_llama_dir).run(prompts, 5)
    steps, recorder = recorded(tiny_llama_dir, (2,))
    assert steps.run(prompts, 5, chunk=1) == expected
    assert recorder.num_replays == len(PROMPTS[1]) + 4


@pytest.mark.parametrize("is_late", [False, True])
def test_drawn_tokens_and_edits_are_those_of_an_eager_run(tiny_llama_dir: Path, is_late: bool) -> None:
    params = [
        GREEDY,
        SamplingParams(temperature=1.0, seed=3),
        SamplingParams(temperature=0.8, top_p=0.8, seed=4, repetition_penalty=1.3),
        SamplingParams(temperature=0, logprobs=2, frequency_penalty=0.5),
    ]
    expected = Steps(tiny_llama_dir).run(PROMPTS[:4], 8, params=params)
    steps, _ = recorded(tiny_llama_dir, (4,), is_late=is_late)
    assert steps.run(PROMPTS[:4], 8, params=params, depth=2) == expected


def test_default_sizes_are_few_and_end_with_the_largest_batch() -> None:
    assert default_sizes(1) == (1,)
    assert default_sizes(3) == (1, 2, 3)
    assert default_sizes(64) == (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
    assert default_sizes(100)[-2:] == (96, 100)
    assert default_sizes(5000)[-3:] == (480, 496, 512)
    assert len(default_sizes(5000)) == 3 + 32 + 16


@given(st.integers(1, 2000), st.data())
def test_a_step_is_padded_by_less_than_its_own_size_and_by_few_rows(most: int, data: st.DataObject) -> None:
    sizes = default_sizes(most)
    assert list(sizes) == sorted(set(sizes))
    rows = data.draw(st.integers(1, sizes[-1]))
    size = next(size for size in sizes if size >= rows)
    assert size - rows < max(2, min(rows, 16))


@given(st.integers(1, 6), st.integers(0, 5), st.integers(1, 4), st.integers(1, 3))
def test_padding_keeps_the_rows_and_adds_rows_of_nobody(rows: int, extra: int, width: int, num_groups: int) -> None:
    inputs = StepInputs(
        token_ids=np.arange(1, rows + 1),
        positions=np.arange(10, rows + 10),
        query_start=np.arange(rows + 1, dtype=np.int32),
        seq_lens=np.arange(11, rows + 11, dtype=np.int32),
        block_tables=(np.full((rows, width), 5, dtype=np.int32),) * num_groups,
        slot_mappings=(np.arange(20, rows + 20),) * num_groups,
        sampled_rows=np.arange(rows),
        prompt_rows=np.empty(0, dtype=np.int64),
    )
    padded = pad_decodes(inputs, rows + extra)
    for name in ("token_ids", "positions", "seq_lens"):
        assert getattr(padded, name)[:rows].tolist() == getattr(inputs, name).tolist()
        assert getattr(padded, name).dtype == getattr(inputs, name).dtype
    assert padded.seq_lens[rows:].tolist() == [1] * extra
    assert padded.query_start.tolist() == list(range(rows + extra + 1))
    assert padded.query_start.dtype == np.int32
    for mapping, table in zip(padded.slot_mappings, padded.block_tables, strict=True):
        assert mapping.tolist() == [*range(20, rows + 20), *[0] * extra]
        assert table.shape == (rows + extra, width)
        assert (table[:rows] == 5).all()
        assert not table[rows:].any()
