"""Steps as messages: what comes out is what went in, read-only, and nothing else than a step is one."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenyard.ipc.codec import Array
from tokenyard.ipc.steps import (
    StepMessage,
    StepResultMessage,
    result_from_message,
    result_to_message,
    step_from_message,
    step_to_message,
)
from tokenyard.ipc.worker_messages import from_worker_codec, to_worker_codec
from tokenyard.request import PoolingParams
from tokenyard.runner_output import Logprobs, ModelRunnerOutput, PromptLogprobs
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler_output import BlockCopy, BlockTableUpdate, HostTransfer, RequestStart, SchedulerOutput, Slot

T = TypeVar("T")

number = st.integers(0, 2**31 - 1)
slots = st.builds(Slot, number, number)
names = st.text(max_size=12)


def ints(size: int | None = None, dtype: type[np.generic] = np.int32) -> st.SearchStrategy[NDArray[np.generic]]:
    """One axis, of this many items or of any number of them."""
    least, most = (0, 6) if size is None else (size, size)
    return st.lists(number, min_size=least, max_size=most).map(lambda values: np.array(values, dtype=dtype))


def flags(size: int) -> st.SearchStrategy[NDArray[np.bool_]]:
    return st.lists(st.booleans(), min_size=size, max_size=size).map(lambda values: np.array(values, dtype=np.bool_))


params = st.builds(
    SamplingParams,
    temperature=st.floats(0.05, 2),
    seed=st.none() | st.integers(0, 2**63 - 1),
    max_tokens=st.none() | st.integers(1, 100),
    logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.none() | st.dictionaries(number, st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(number, min_size=1, max_size=3),
    extra_args=st.none() | st.just({"a": [1, None, {"b": "ü"}]}),
)
starts = st.builds(
    RequestStart,
    request_id=names,
    slot=slots,
    token_ids=ints(),
    num_prompt_tokens=number,
    num_computed_tokens=number,
    block_ids=st.lists(ints(), max_size=3).map(tuple),
    params=params,
    lora_name=st.none() | names,
    stop_token_ids=st.lists(number, max_size=3).map(tuple),
    bad_words_token_ids=st.lists(st.lists(number, max_size=3).map(tuple), max_size=3).map(tuple),
)


@st.composite
def transfers(draw: st.DrawFn) -> HostTransfer:
    count = draw(st.integers(0, 4))
    return HostTransfer(draw(ints(count)), draw(ints(count)), draw(st.booleans()), draw(number))  # type: ignore[arg-type]


@st.composite
def steps(draw: st.DrawFn) -> SchedulerOutput:
    rows = draw(st.integers(0, 5))
    return SchedulerOutput(
        step=draw(st.integers(0, 2**62)),
        scheduled_at=draw(st.floats(0, 1e9)),
        new=draw(st.lists(starts, max_size=2)),
        resumed=draw(st.lists(starts, max_size=2)),
        slots=draw(ints(rows, np.int64)),  # type: ignore[arg-type]
        generations=draw(ints(rows)),  # type: ignore[arg-type]
        num_computed_tokens=draw(ints(rows)),  # type: ignore[arg-type]
        num_scheduled_tokens=draw(ints(rows)),  # type: ignore[arg-type]
        samples=draw(flags(rows)),
        num_draft_tokens=draw(st.none() | ints(rows)),  # type: ignore[arg-type]
        draft_token_ids=draw(st.none() | ints()),  # type: ignore[arg-type]
        lora_ids=draw(st.none() | ints(rows)),  # type: ignore[arg-type]
        wants_prompt_logprobs=draw(st.none() | flags(rows)),
        block_table_updates=draw(st.lists(st.builds(BlockTableUpdate, slots, number, number, ints()), max_size=3)),
        finished=draw(st.lists(slots, max_size=3)),
        paused=draw(st.lists(slots, max_size=3)),
        block_copies=draw(st.lists(st.builds(BlockCopy, number, number, number), max_size=3)),
        host_transfers=draw(st.lists(transfers(), max_size=3)),
    )


@st.composite
def some_logprobs(draw: st.DrawFn) -> Logprobs:
    count, width = draw(st.integers(0, 4)), draw(st.integers(1, 3))
    values = draw(st.lists(st.floats(-100, 0, width=32), min_size=count * width, max_size=count * width))
    return Logprobs(
        rows=draw(ints(count)),  # type: ignore[arg-type]
        token_ids=draw(ints(count * width)).reshape(count, width),  # type: ignore[arg-type]
        logprobs=np.array(values, dtype=np.float32).reshape(count, width),
        sampled_ranks=draw(ints(count)),  # type: ignore[arg-type]
    )


results = st.builds(
    ModelRunnerOutput,
    step=st.integers(0, 2**62),
    num_sampled=ints(),
    token_ids=ints(),
    logprobs=st.none() | some_logprobs(),
    prompt_logprobs=st.lists(
        st.builds(PromptLogprobs, request_id=names, start=number, logprobs=some_logprobs()), max_size=2
    ),
    draft_token_ids=st.none() | st.lists(ints(), max_size=2),
    finished_kv_transfers=st.lists(names, max_size=2),
    errors=st.dictionaries(names, names, max_size=2),
)


def plain(value: object) -> object:
    """To compare: arrays with their type, sequences of any kind as lists."""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tolist()
    if isinstance(value, SamplingParams):
        return value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def is_read_only(value: object) -> bool:
    if isinstance(value, np.ndarray):
        return not value.flags.writeable
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return all(is_read_only(getattr(value, field.name)) for field in dataclasses.fields(value))
    return all(map(is_read_only, value)) if isinstance(value, list | tuple) else True


@settings(deadline=None, max_examples=150)
@given(steps())
def test_a_step_comes_out_as_it_went_in(step: SchedulerOutput) -> None:
    codec = to_worker_codec()
    message = codec.decode(codec.encode(step_to_message(step)))
    assert isinstance(message, StepMessage)
    found = step_from_message(message)
    assert plain(found) == plain(step)
    assert is_read_only(found)


@settings(deadline=None, max_examples=150)
@given(results)
def test_a_result_comes_out_as_it_went_in(result: ModelRunnerOutput) -> None:
    codec = from_worker_codec()
    message = codec.decode(codec.encode(result_to_message(result)))
    assert isinstance(message, StepResultMessage)
    found = result_from_message(message)
    assert plain(found) == plain(result)
    assert is_read_only(found)


def a_step() -> SchedulerOutput:
    row = np.ones(1, dtype=np.int32)
    start = RequestStart(
        request_id="a",
        slot=Slot(0, 1),
        token_ids=np.arange(3, dtype=np.int32),
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=(row,),
        params=SamplingParams(),
    )
    return SchedulerOutput(
        step=1,
        new=(start,),
        slots=row.astype(np.int64),
        generations=row,
        num_computed_tokens=row,
        num_scheduled_tokens=row,
        samples=row.astype(np.bool_),
    )


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_a_frame_that_was_tampered_with_is_dropped_or_refused_and_nothing_else(data: st.DataObject) -> None:
    """2.3 #21: of a changed byte comes no message, another message, or a ValueError: never anything else."""
    codec = to_worker_codec()
    frame = bytearray(codec.encode(step_to_message(a_step())))
    frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    message = codec.decode(bytes(frame))
    assert (message is None) == (codec.num_dropped == 1)
    if isinstance(message, StepMessage):
        try:
            step_from_message(message)
        except ValueError:  # ValidationError is one
            return


@pytest.mark.parametrize("column", ["slots", "generations", "samples"])
def test_a_column_of_another_type_or_shape_is_refused(column: str) -> None:
    message = step_to_message(a_step())
    for wrong in (Array.of(np.ones(1, dtype=np.float32)), Array.of(np.ones((1, 1), dtype=np.int64))):
        with pytest.raises(ValueError, match="an array of"):
            step_from_message(msgspec.structs.replace(message, **{column: wrong}))


def test_what_does_not_travel_is_refused_where_it_is_sent() -> None:
    start = dataclasses.replace(a_step().new[0], request_id="p", params=PoolingParams())
    with pytest.raises(TypeError, match="request p pools"):
        step_to_message(dataclasses.replace(a_step(), new=(start,)))
    with pytest.raises(TypeError, match="K/V transfers"):
        step_to_message(dataclasses.replace(a_step(), kv_transfers=("x",)))
    pooled = ModelRunnerOutput(
        step=0, num_sampled=np.zeros(0, np.int32), token_ids=np.zeros(0, np.int32), pooled={"a": 1}
    )
    with pytest.raises(TypeError, match="pooled states"):
        result_to_message(pooled)


def test_a_step_of_many_rows_is_sent_as_columns() -> None:
    """A request that only goes on costs its place in a few arrays."""
    sizes = []
    for rows in (1, 1001):
        step = dataclasses.replace(
            a_step(),
            new=(),
            slots=np.arange(rows, dtype=np.int64),
            generations=np.ones(rows, dtype=np.int32),
            num_computed_tokens=np.ones(rows, dtype=np.int32),
            num_scheduled_tokens=np.ones(rows, dtype=np.int32),
            samples=np.ones(rows, dtype=np.bool_),
        )
        sizes.append(len(to_worker_codec().encode(step_to_message(step))))
    assert sizes[1] - sizes[0] < 1000 * (8 + 4 + 4 + 4 + 1) + 50


def test_a_copy_of_blocks_to_another_number_of_host_blocks_is_no_step() -> None:
    two, one = (Array.of(np.arange(count, dtype=np.int32)) for count in (2, 1))
    none = np.zeros(0, dtype=np.int32)
    step = SchedulerOutput(
        step=0,
        slots=none.astype(np.int64),
        generations=none,
        num_computed_tokens=none,
        num_scheduled_tokens=none,
        samples=none.astype(np.bool_),
    )
    message = msgspec.structs.replace(step_to_message(step), host_transfers=((two, one, True, 0),))
    with pytest.raises(ValueError, match="2 blocks are to be copied to or from 1 host blocks"):
        step_from_message(message)
