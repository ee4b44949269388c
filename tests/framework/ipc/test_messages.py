from __future__ import annotations

import dataclasses
import math
import random
from enum import Enum
from pathlib import Path
from typing import get_args

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as np_st
from tokenyard import errors
from tokenyard.engine_outputs import (
    AdmittedRequest,
    EngineCoreOutputs,
    FinishedRequest,
    PluginStats,
    PluginTime,
    RequestEvent,
    RequestEventKind,
    SchedulerStats,
)
from tokenyard.errors import EngineOverloadedError, TokenyardError, ValidationError
from tokenyard.interfaces.kv_cache import ExtraKey
from tokenyard.ipc import failures, messages, outputs, reports, requests
from tokenyard.ipc.failures import error_from_message, error_to_message
from tokenyard.ipc.messages import FromEngine, ToEngine, from_engine_codec, to_engine_codec
from tokenyard.ipc.outputs import outputs_from_message, outputs_to_message
from tokenyard.ipc.params import FIELDS, params_from_message, params_to_message
from tokenyard.ipc.plain import to_plain
from tokenyard.ipc.requests import request_from_message, request_to_message
from tokenyard.request import RETENTION_LEVELS, EngineCoreRequest, FinishReason, ServiceLevel
from tokenyard.runner_output import Logprobs, PromptLogprobs
from tokenyard.sampling_params import NOT_YET, RequestOutputKind, SamplingParams

IDS = st.text(max_size=8)
TOKENS = st.integers(0, 2**31 - 1)
SECONDS = st.floats(-1e6, 1e6)
LABELS = st.none() | st.text(max_size=5)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | st.floats(-1e300, 1e300) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
EXACT = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])


def _json(leaves: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(st.text(min_size=1, max_size=3), leaves, min_size=1, max_size=3)


PARAMS = st.builds(
    SamplingParams,
    n=st.integers(1, 5),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    repetition_penalty=st.floats(0.01, 10),
    temperature=st.just(0.0) | st.floats(0.01, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(-1, 100),
    min_p=st.floats(0, 1),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.lists(st.text(min_size=1, max_size=4), max_size=3),
    stop_token_ids=st.lists(TOKENS, max_size=3),
    ignore_eos=st.booleans(),
    max_tokens=st.none() | st.integers(5, 2**63 - 1),
    min_tokens=st.integers(0, 5),
    logprobs=st.none() | st.integers(-1, 5),
    prompt_logprobs=st.none() | st.integers(-1, 5),
    skip_special_tokens=st.booleans(),
    include_stop_str_in_output=st.booleans(),
    output_kind=st.sampled_from(RequestOutputKind),
    stream_interval=st.none() | st.integers(1, 9),
    logit_bias=st.none() | st.dictionaries(TOKENS, st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(TOKENS, min_size=1, max_size=3),
    bad_words=st.none() | st.lists(st.text(min_size=1, max_size=4), max_size=3),
    extra_args=st.none() | _json(PLAIN) | st.just({"large": 10**30}),
)

REQUESTS = st.builds(
    EngineCoreRequest,
    request_id=IDS,
    prompt_token_ids=np_st.arrays(np.int32, st.integers(1, 20)),
    params=PARAMS,
    arrival_time=SECONDS,
    stop_token_ids=st.lists(TOKENS, max_size=3).map(tuple),
    eos_token_ids=st.lists(TOKENS, max_size=3).map(tuple),
    bad_words_token_ids=st.lists(st.lists(TOKENS, max_size=3).map(tuple), max_size=2).map(tuple),
    priority=st.integers(-(2**53), 2**53),
    client_id=LABELS,
    session_id=LABELS,
    parent_id=LABELS,
    deadline=st.none() | SECONDS,
    service_level=st.none() | st.builds(ServiceLevel, st.none() | st.floats(0, 9), st.none(), st.floats(0, 9)),
    skip_prefix_cache=st.booleans(),
    cache_salt=LABELS,
    lora_name=LABELS,
    extra_keys=st.lists(st.builds(ExtraKey, st.text(max_size=3), st.integers(0, 9), st.integers(0, 9))).map(tuple),
    metadata=st.dictionaries(st.text(max_size=3), PLAIN, max_size=3),
    retention=st.sampled_from(RETENTION_LEVELS),
    true_output_tokens=st.none() | st.integers(1, 2**63 - 1),
)


@st.composite
def logprob_rows(draw: st.DrawFn) -> Logprobs:
    rows, columns = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    return Logprobs(
        rows=draw(np_st.arrays(np.int32, rows)),
        token_ids=draw(np_st.arrays(np.int32, (rows, columns))),
        logprobs=draw(np_st.arrays(np.float32, (rows, columns), elements=st.floats(-9, 0, width=32))),
        sampled_ranks=draw(np_st.arrays(np.int32, rows)),
    )


COUNTS = st.integers(0, 2**40)
STATS = st.builds(
    SchedulerStats,
    **{one.name: COUNTS for one in dataclasses.fields(SchedulerStats) if one.name.startswith(("num_", "prefix"))}
    | {
        "wait_reason": LABELS,
        "num_waiting_by_reason": st.dictionaries(IDS, COUNTS, max_size=2),
        "num_rejected_by_reason": st.dictionaries(IDS, COUNTS, max_size=2),
        "plugins": st.none()
        | st.builds(
            PluginStats,
            times=st.lists(st.builds(PluginTime, IDS, IDS, IDS, st.floats(0, 1e6), COUNTS), max_size=2).map(tuple),
            step_seconds=st.floats(0, 1e6),
            num_over_budget=COUNTS,
        ),
    },
)


@st.composite
def engine_outputs(draw: st.DrawFn) -> EngineCoreOutputs:
    counts = draw(st.lists(st.integers(1, 3), max_size=4))
    token_ids = draw(np_st.arrays(np.int32, sum(counts)))
    return EngineCoreOutputs(
        request_ids=[f"r{index}" for index in range(len(counts))],
        num_tokens=np.array(counts, dtype=np.int32),
        token_ids=token_ids,
        finished=draw(
            st.lists(
                st.builds(
                    FinishedRequest,
                    request_id=IDS,
                    reason=st.sampled_from(FinishReason),
                    stop_reason=st.none() | TOKENS | st.text(max_size=3),
                    error=LABELS,
                    client_id=LABELS,
                ),
                max_size=3,
            )
        ),
        admitted=draw(
            st.lists(
                st.builds(
                    AdmittedRequest, request_id=IDS, num_cached_tokens=COUNTS, scheduled_at=SECONDS, client_id=LABELS
                ),
                max_size=3,
            )
        ),
        events=draw(
            st.lists(
                st.builds(
                    RequestEvent,
                    request_id=IDS,
                    kind=st.sampled_from(RequestEventKind),
                    at=SECONDS,
                    num_tokens=COUNTS,
                    reason=LABELS,
                ),
                max_size=3,
            )
        ),
        logprobs=draw(st.none() | logprob_rows()),
        prompt_logprobs=draw(
            st.lists(
                st.builds(PromptLogprobs, request_id=IDS, start=st.integers(1, 9), logprobs=logprob_rows()), max_size=2
            )
        ),
        stats=draw(st.none() | STATS),
        num_scheduled_tokens=draw(COUNTS),
        did_run=draw(st.booleans()),
    )


def same(left: object, right: object) -> bool:
    """Equal, arrays included; times to a microsecond, since they crossed a clock."""
    if isinstance(left, np.ndarray):
        return isinstance(right, np.ndarray) and left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, float) and not isinstance(left, bool):
        return isinstance(right, float) and math.isclose(left, right, abs_tol=1e-6)
    if dataclasses.is_dataclass(left):
        names = [one.name for one in dataclasses.fields(left)]
        return type(left) is type(right) and all(same(getattr(left, name), getattr(right, name)) for name in names)
    if isinstance(left, list | tuple) and isinstance(right, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


@EXACT
@given(PARAMS)
def test_sampling_params_come_back_equal(params: SamplingParams) -> None:
    decoder = msgspec.msgpack.Decoder(type(params_to_message(params)))
    assert params_from_message(decoder.decode(msgspec.msgpack.encode(params_to_message(params)))) == params


def test_every_sampling_parameter_travels_but_those_that_take_their_default_alone() -> None:
    assert {one.name for one in dataclasses.fields(SamplingParams)} == set(FIELDS) | NOT_YET


@EXACT
@given(REQUESTS, SECONDS, SECONDS)
def test_a_request_comes_back_equal_on_another_clock(request: EngineCoreRequest, sent: float, received: float) -> None:
    codec = to_engine_codec()
    message = codec.decode(codec.encode(messages.AddRequests([request_to_message(request, sent)])))
    assert isinstance(message, messages.AddRequests)
    back = request_from_message(message.requests[0], received)
    shifted = dataclasses.replace(
        request,
        arrival_time=request.arrival_time - sent + received,
        deadline=None if request.deadline is None else request.deadline - sent + received,
    )
    assert same(back, shifted)


@EXACT
@given(engine_outputs(), SECONDS, SECONDS)
def test_outputs_come_back_equal_on_another_clock(given_: EngineCoreOutputs, sent: float, received: float) -> None:
    codec = from_engine_codec()
    message = codec.decode(codec.encode(outputs_to_message(given_, sent)))
    assert isinstance(message, outputs.OutputsMessage)
    shift = received - sent
    shifted = dataclasses.replace(
        given_,
        admitted=[dataclasses.replace(one, scheduled_at=one.scheduled_at + shift) for one in given_.admitted],
        events=[dataclasses.replace(one, at=one.at + shift) for one in given_.events],
    )
    assert same(outputs_from_message(message, received), shifted)


@pytest.mark.parametrize(
    ("kind", "message", "others"),
    [
        (EngineCoreOutputs, outputs.OutputsMessage, {"pooled", "finished_kv_transfers", "kv_events"}),
        (SchedulerStats, outputs.StatsMessage, set()),
        (FinishedRequest, outputs.FinishedMessage, set()),
        (AdmittedRequest, outputs.AdmittedMessage, {"scheduled_at"}),
        (RequestEvent, outputs.EventMessage, {"at"}),
        (PromptLogprobs, outputs.PromptLogprobsMessage, set()),
        (Logprobs, outputs.LogprobsMessage, set()),
        (EngineCoreRequest, requests.RequestMessage, {"arrival_time", "deadline", "prompt_token_ids"}),
    ],
)
def test_no_field_is_forgotten(kind: type, message: type, others: set[str]) -> None:
    """`others` travel under another name, or do not on purpose."""
    assert {one.name for one in dataclasses.fields(kind)} - set(message.__struct_fields__) == others


SMALL = st.integers(-(2**63), 2**63 - 1)
IDENTITIES = st.builds(messages.Identity, SMALL, IDS, st.tuples(SMALL, SMALL))
ERRORS = st.builds(
    failures.ErrorMessage,
    IDS,
    IDS,
    LABELS,
    st.none() | st.booleans() | SMALL | st.floats(allow_nan=False) | IDS,
    st.none() | SECONDS,
    LABELS,
)
REPORTS = st.builds(
    reports.ReportMessage,
    kv_cache_groups=st.lists(st.builds(reports.GroupMessage, SMALL, SMALL, st.none() | SMALL)).map(tuple),
    available_bytes=SMALL,
    vocab_size=SMALL,
    decoder=IDS,
    attention_backend=IDS,
    device=IDS,
    dtype=IDS,
    load_seconds=SECONDS,
    attention_description=IDS,
)
MESSAGES: dict[type, st.SearchStrategy[object]] = {
    messages.Launch: st.builds(
        messages.Launch,
        IDENTITIES,
        st.dictionaries(IDS, PLAIN, max_size=3),
        st.lists(st.builds(messages.ComponentMessage, IDS, IDS, IDS, IDS), max_size=3),
        SMALL,
        SMALL,
    ),
    messages.AddRequests: st.builds(
        messages.AddRequests,
        st.lists(REQUESTS.map(lambda request: request_to_message(request, 0.0)), max_size=2),
        st.none() | SMALL,
    ),
    messages.FinishRequests: st.builds(messages.FinishRequests, st.lists(IDS), st.sampled_from(FinishReason)),
    messages.Call: st.builds(
        messages.Call,
        SMALL,
        st.sampled_from(["reset_prefix_cache", "stats", "pause", "resume", "health", "settle"]),
        st.sampled_from(["keep", "wait", "abort"]),
    ),
    messages.Stop: st.builds(messages.Stop),
    messages.Hello: st.builds(messages.Hello, IDENTITIES),
    messages.StartPhase: st.builds(messages.StartPhase, IDS),
    messages.Ready: st.builds(messages.Ready, REPORTS, SMALL, SMALL, LABELS),
    outputs.OutputsMessage: engine_outputs().map(lambda one: outputs_to_message(one, 0.0)),
    messages.Refused: st.builds(messages.Refused, st.lists(IDS), ERRORS),
    messages.Answer: st.builds(
        messages.Answer,
        SMALL,
        st.none() | ERRORS,
        st.none() | st.booleans(),
        st.none() | STATS.map(outputs.stats_to_message),
        st.lists(IDS),
        SMALL,
    ),
    messages.Died: st.builds(messages.Died, ERRORS),
    messages.Ended: st.builds(messages.Ended),
}


def test_all_messages_are_tested() -> None:
    assert set(MESSAGES) == {*get_args(ToEngine), *get_args(FromEngine)}


@pytest.mark.parametrize("kind", MESSAGES)
def test_every_message_comes_back_equal(kind: type) -> None:
    @EXACT
    @given(MESSAGES[kind])
    def check(message: object) -> None:
        if kind in get_args(ToEngine):
            to_engine = to_engine_codec()
            assert to_engine.decode(to_engine.encode(message)) == message  # type: ignore[arg-type]
        else:
            from_engine = from_engine_codec()
            assert from_engine.decode(from_engine.encode(message)) == message  # type: ignore[arg-type]

    check()


@EXACT
@given(st.sampled_from(["to", "from"]), st.integers(0, 2**32), REQUESTS, engine_outputs())
def test_a1_mutated_frames_are_messages_or_dropped_and_never_raise(
    way: str, seed: int, request: EngineCoreRequest, given_: EngineCoreOutputs
) -> None:
    rng = random.Random(seed)
    codec = to_engine_codec() if way == "to" else from_engine_codec()
    frame = bytearray(
        to_engine_codec().encode(messages.AddRequests([request_to_message(request, 0.0)]))
        if way == "to"
        else from_engine_codec().encode(outputs_to_message(given_, 0.0))
    )
    for _ in range(rng.randint(1, 6)):
        frame[rng.randrange(len(frame))] = rng.randrange(256)
    message = codec.decode(frame[: rng.randrange(len(frame) + 1)] if rng.random() < 0.3 else frame)
    assert (message is None) == (codec.num_dropped == 1)
    # What can be read and is still no request or result is refused as a ValueError, which its reader expects.
    try:
        if isinstance(message, messages.AddRequests):
            [request_from_message(one, 0.0) for one in message.requests]
        elif isinstance(message, outputs.OutputsMessage):
            outputs_from_message(message, 0.0)
    except ValueError:
        pass


def test_a_request_with_an_id_that_is_no_text_is_a_type_error_before_it_is_sent() -> None:
    """E1"""
    request = EngineCoreRequest(
        request_id=7,  # type: ignore[arg-type]
        prompt_token_ids=np.array([1], dtype=np.int32),
        params=SamplingParams(),
        arrival_time=0.0,
    )
    with pytest.raises(TypeError, match="a request id is a string; got 7"):
        request_to_message(request, 0.0)


@pytest.mark.parametrize("length", [0, -1, True, 1.5, "3", 2**63])
def test_a_true_length_that_is_no_number_of_tokens_is_refused_by_the_sender(length: object) -> None:
    request = EngineCoreRequest(
        request_id="a",
        prompt_token_ids=np.array([1], dtype=np.int32),
        params=SamplingParams(),
        arrival_time=0.0,
        true_output_tokens=length,  # type: ignore[arg-type]
    )
    with pytest.raises(ValidationError, match=r"true_output_tokens=.* whole number of tokens, at least 1"):
        request_to_message(request, 0.0)


@pytest.mark.parametrize("field", ["age", "seconds_left"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_times_that_are_not_finite_are_refused(field: str, value: float) -> None:
    request = EngineCoreRequest(
        request_id="a", prompt_token_ids=np.array([1], dtype=np.int32), params=SamplingParams(), arrival_time=0.0
    )
    message = msgspec.structs.replace(request_to_message(request, 0.0), **{field: value})
    with pytest.raises(ValidationError, match="finite"):
        request_from_message(message, 0.0)


ALL_ERRORS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TokenyardError)]


@pytest.mark.parametrize("kind", ALL_ERRORS)
def test_every_error_of_ours_comes_back_as_what_it_was(kind: type[TokenyardError]) -> None:
    if issubclass(kind, ValidationError):
        error: TokenyardError = kind("it is wrong", parameter="n", value=7)
    elif issubclass(kind, EngineOverloadedError):
        error = kind("it is full", retry_after=2.5)
    else:
        error = kind("it went wrong")
    back = error_from_message(error_to_message(error))
    assert type(back) is kind
    assert str(back) == str(error)
    if isinstance(error, ValidationError):
        assert isinstance(back, ValidationError)
        assert (back.parameter, back.value) == ("n", 7)
    if isinstance(error, EngineOverloadedError):
        assert isinstance(back, EngineOverloadedError)
        assert back.retry_after == 2.5


def test_an_error_of_an_unknown_class_keeps_its_name_its_text_and_its_cause() -> None:
    class OddError(Exception):
        pass

    error = OddError("boom")
    error.__cause__ = KeyError("x")
    back = error_from_message(error_to_message(error))
    assert type(back) is RuntimeError
    assert str(back) == "OddError: boom"
    assert "KeyError" in str(back.__cause__)


def test_the_value_of_a_validation_error_may_be_anything() -> None:
    class Unspeakable:
        def __repr__(self) -> str:
            raise RuntimeError

    for value in (Unspeakable(), 2**100, [1, 2], "x" * 10**6):
        message = error_to_message(ValidationError("wrong", parameter="p", value=value))
        assert len(msgspec.msgpack.encode(message)) < 50_000


class Colour(Enum):
    RED = "BLUE"
    BLUE = "RED"


@dataclasses.dataclass(frozen=True)
class Inner:
    colour: Colour
    path: Path


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Inner
    sizes: tuple[int, ...]
    by_name: dict[str, Inner]
    either: int | str | None = None


def test_typed_values_become_plain_and_typed_again() -> None:
    from tokenyard.launch.convert import to_dataclass

    inner = Inner(Colour.BLUE, Path("/a"))
    outer = Outer(inner, (1, 2), {"x": inner}, "7")
    plain = to_plain(outer)
    assert plain == {
        "inner": {"colour": "BLUE", "path": "/a"},
        "sizes": [1, 2],
        "by_name": {"x": {"colour": "BLUE", "path": "/a"}},
        "either": "7",
    }
    assert to_dataclass(Outer, plain, "o") == outer  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [2**64, -(2**63) - 1])
def test_a_number_that_no_message_holds_is_refused_by_name(value: int) -> None:
    with pytest.raises(TypeError, match="does not travel between processes"):
        to_plain([value])


def test_what_is_no_plain_data_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="does not travel between processes"):
        to_plain({"x": object()})
