"""OutputProcessor: logprobs as users see them, and what a stream gets."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from step_outputs import ended, logprob_of, logprob_rows, prompt_logprobs, step
from tiny_tokenizers import byte_level
from tokenyard.engine.input_processor import TokenizedPrompt
from tokenyard.engine.output_processor import OutputProcessor
from tokenyard.outputs import CompletionOutput, Logprob, RequestOutput
from tokenyard.runner_output import Logprobs
from tokenyard.sampling_params import RequestOutputKind, SamplingParams

TOKENIZER = byte_level()
A, B, C, D = (TOKENIZER.encode(letter)[0] for letter in "acxd")
KINDS = list(RequestOutputKind)


def make(*request_ids: str, n: int = 1, prompt: str = "xx", **options: object) -> OutputProcessor:
    """A processor that expects these requests; children of one with n > 1 are called 0_ID, 1_ID ..."""
    processor = OutputProcessor(TOKENIZER)
    params = SamplingParams(n=n, **options)  # type: ignore[arg-type]
    for request_id in request_ids:
        children = [request_id] if n == 1 else [f"{index}_{request_id}" for index in range(n)]
        prompt_ids = TokenizedPrompt(prompt, TOKENIZER.encode(prompt))
        processor.add(request_id, prompt_ids, params, arrival_time=1.0, child_ids=children)
    return processor


def completion_of(processor: OutputProcessor, request_id: str = "r") -> CompletionOutput:
    return processor.pop(request_id).outputs[0]


# Logprobs


def test_e16_without_logprobs_there_are_none() -> None:
    processor = make("r")
    processor.process(step([("r", [A])]), now=1.0)
    output = processor.pop("r")
    assert (output.outputs[0].logprobs, output.outputs[0].cumulative_logprob, output.prompt_logprobs) == (None,) * 3


def test_e16_zero_logprobs_are_those_of_the_tokens_themselves() -> None:
    processor = make("r", logprobs=0)
    processor.process(step([("r", [A])], logprobs=logprob_rows([(0, A)])), now=1.0)
    processor.process(step([("r", [B])], logprobs=logprob_rows([(0, B)])), now=1.0)
    completion = completion_of(processor)
    assert completion.logprobs == [
        {A: Logprob(logprob=logprob_of(A), rank=1 + A, decoded_token="a", token_bytes=b"a")},
        {B: Logprob(logprob=logprob_of(B), rank=1 + B, decoded_token="c", token_bytes=b"c")},
    ]
    assert completion.cumulative_logprob == logprob_of(A) + logprob_of(B)


def test_e16_k_logprobs_are_the_most_likely_tokens_and_the_token_itself() -> None:
    processor = make("r", logprobs=2)
    processor.process(step([("r", [A])], logprobs=logprob_rows([(0, A)], [B, C])), now=1.0)
    processor.process(step([("r", [C])], logprobs=logprob_rows([(0, C)], [B, C])), now=1.0)
    outside, inside = completion_of(processor).logprobs or []
    assert [(token, entry.rank) for token, entry in outside.items()] == [(A, 1 + A), (B, 1), (C, 2)]
    assert {token: entry.rank for token, entry in inside.items()} == {C: 1 + C, B: 1}
    assert next(iter(inside)) == C


def test_e16_a_row_that_asked_for_fewer_than_others_has_no_padding() -> None:
    processor = make("r", logprobs=1)
    rows = logprob_rows([(0, A)], [B, -1, -1])
    processor.process(step([("r", [A])], logprobs=rows), now=1.0)
    assert [list(position) for position in completion_of(processor).logprobs or []] == [[A, B]]


def test_logprobs_belong_to_the_tokens_that_their_rows_name() -> None:
    processor = make("p", "q", logprobs=0)
    rows = logprob_rows([(1, A), (2, B), (3, C)])
    processor.add("other", TokenizedPrompt(None, [A]), SamplingParams(), 1.0, ["other"])
    processor.process(step([("other", [D]), ("p", [A, B]), ("q", [C])], logprobs=rows), now=1.0)
    assert [list(position) for position in completion_of(processor, "p").logprobs or []] == [[A], [B]]
    assert [list(position) for position in completion_of(processor, "q").logprobs or []] == [[C]]
    assert completion_of(processor, "other").logprobs is None


def test_logprobs_of_tokens_behind_a_stop_string_are_dropped_with_them() -> None:
    processor = make("r", logprobs=0, stop="c")
    rows = logprob_rows([(0, A), (1, B), (2, C), (3, D)])
    update = processor.process(step([("r", [A, B, C, D])], logprobs=rows), now=1.0)
    assert list(update.stopped) == ["r"]
    completion = completion_of(processor)
    assert (list(completion.token_ids), completion.text) == ([A, B], "a")
    assert [list(position) for position in completion.logprobs or []] == [[A], [B]]
    assert completion.cumulative_logprob == logprob_of(A) + logprob_of(B)


def test_a_token_whose_step_failed_has_an_empty_position() -> None:
    processor = make("r", logprobs=0)
    processor.process(step([("r", [A])], logprobs=logprob_rows([(0, A)])), now=1.0)
    processor.process(step([("r", [B])], finished=[ended("r", "error", error="why")]), now=1.0)
    output = processor.pop("r")
    assert [list(position) for position in output.outputs[0].logprobs or []] == [[A], []]
    assert (output.error, output.outputs[0].finish_reason) == ("why", "error")


def test_smp_14_logprobs_are_finite_whatever_an_executor_says() -> None:
    processor = make("r", logprobs=1)
    rows = Logprobs(
        rows=np.array([0], dtype=np.int32),
        token_ids=np.array([[A, B]], dtype=np.int32),
        logprobs=np.array([[-np.inf, np.finfo(np.float32).min]], dtype=np.float32),
        sampled_ranks=np.array([9], dtype=np.int32),
    )
    processor.process(step([("r", [A])], logprobs=rows), now=1.0)
    (position,) = completion_of(processor).logprobs or []
    assert all(math.isfinite(entry.logprob) for entry in position.values())
    json.dumps([entry.logprob for entry in position.values()], allow_nan=False)


def test_txt_15_a_tokens_text_and_bytes_are_what_it_alone_adds() -> None:
    ids = TOKENIZER.encode("\na😀")
    processor = make("r", logprobs=0, prompt="\nb")
    for token_id in ids:
        processor.process(step([("r", [token_id])], logprobs=logprob_rows([(0, token_id)])), now=1.0)
    completion = completion_of(processor)
    entries = [position[token_id] for token_id, position in zip(ids, completion.logprobs or [], strict=True)]
    assert b"".join(entry.token_bytes or b"" for entry in entries).decode() == completion.text == "\na😀"
    assert [entry.decoded_token for entry in entries] == ["\n", "a", "\ufffd", "\ufffd", "\ufffd", "\ufffd"]


def test_logprobs_without_detokenizing_have_no_texts() -> None:
    processor = make("r", logprobs=1, prompt_logprobs=0, detokenize=False)
    chunk = prompt_logprobs("r", 1, [C])
    processor.process(step([("r", [A])], logprobs=logprob_rows([(0, A)], [B]), prompt=[chunk]), now=1.0)
    output = processor.pop("r")
    positions = [*(output.outputs[0].logprobs or []), *(output.prompt_logprobs or [])[1:]]
    entries = [entry for position in positions for entry in (position or {}).values()]
    assert len(entries) == 3
    assert all(entry.decoded_token is None and entry.token_bytes is None for entry in entries)


# Logprobs of prompts


def test_e16_prompt_logprobs_cover_the_prompt_and_the_first_is_none() -> None:
    processor = make("r", prompt="abcd", prompt_logprobs=1)
    ids = TOKENIZER.encode("abcd")
    processor.process(step(prompt=[prompt_logprobs("r", 1, ids[1:2], [C])]), now=1.0)
    processor.process(step([("r", [A])], prompt=[prompt_logprobs("r", 2, ids[2:], [C])]), now=1.0)
    positions = processor.pop("r").prompt_logprobs
    assert positions is not None
    assert len(positions) == len(ids)
    assert positions[0] is None
    assert [list(position or {}) for position in positions[1:]] == [[token_id, C] for token_id in ids[1:]]


def test_e16_a_chunk_that_comes_again_after_a_preemption_changes_nothing() -> None:
    processor = make("r", prompt="dcba", prompt_logprobs=0)
    ids = TOKENIZER.encode("dcba")
    processor.process(step(prompt=[prompt_logprobs("r", 1, ids[1:2])]), now=1.0)
    processor.process(step(prompt=[prompt_logprobs("r", 1, [D])]), now=1.0)
    processor.process(step(prompt=[prompt_logprobs("r", 1, [D, *ids[2:]])]), now=1.0)
    positions = processor.pop("r").prompt_logprobs or []
    assert [list(position or {}) for position in positions] == [[], *([token_id] for token_id in ids[1:])]


def test_prompt_logprobs_that_nobody_asked_for_or_waits_for_are_passed_over() -> None:
    processor = make("r")
    processor.process(step(prompt=[prompt_logprobs("r", 1, [A]), prompt_logprobs("gone", 1, [A])]), now=1.0)
    assert processor.pop("r").prompt_logprobs is None


# Streams


def take(processor: OutputProcessor, request_id: str = "r") -> RequestOutput:
    output = processor.stream_output(request_id)
    assert output is not None
    return output


def test_e9_a_delta_has_what_is_new_and_that_only() -> None:
    processor = make("r", output_kind=RequestOutputKind.DELTA, logprobs=0, prompt_logprobs=0)
    chunk = prompt_logprobs("r", 1, [C])
    processor.process(step([("r", [A])], logprobs=logprob_rows([(0, A)]), prompt=[chunk]), now=1.0)
    first = take(processor)
    assert processor.stream_output("r") is None
    for token_id in (B, C):
        processor.process(step([("r", [token_id])], logprobs=logprob_rows([(0, token_id)])), now=1.0)
    second = take(processor)
    processor.process(step(finished=[ended("r")]), now=1.0)
    last = take(processor)
    outputs = [first.outputs[0], second.outputs[0], last.outputs[0]]
    assert [(output.text, output.token_ids) for output in outputs] == [("a", [A]), ("cx", [B, C]), ("", [])]
    assert [[list(position) for position in output.logprobs or []] for output in outputs] == [[[A]], [[B], [C]], []]
    assert outputs[1].cumulative_logprob == sum(map(logprob_of, (A, B, C)))
    assert [output.prompt_logprobs is None for output in (first, second, last)] == [False, True, True]
    assert [output.finished for output in (first, second, last)] == [False, False, True]
    assert last.outputs[0].finish_reason == "length"
    assert processor.stream_output("r") is None


def test_a_cumulative_stream_has_everything_each_time() -> None:
    processor = make("r")
    processor.process(step([("r", [A])]), now=1.0)
    first = take(processor)
    assert processor.stream_output("r") is None
    processor.process(step([("r", [B])]), now=1.0)
    assert (take(processor).outputs[0].text, first.outputs[0].text) == ("ac", "a")
    assert first.outputs[0].token_ids == [A]


def test_a_stream_of_final_outputs_has_one() -> None:
    processor = make("r", output_kind=RequestOutputKind.FINAL_ONLY)
    processor.process(step([("r", [A])]), now=1.0)
    assert processor.stream_output("r") is None
    processor.process(step([("r", [B])], finished=[ended("r")]), now=1.0)
    assert take(processor).outputs[0].text == "ac"
    assert processor.stream_output("r") is None


@pytest.mark.parametrize("kind", [RequestOutputKind.CUMULATIVE, RequestOutputKind.DELTA])
def test_e9_a_stream_interval_keeps_the_first_token_and_the_end(kind: RequestOutputKind) -> None:
    processor = make("r", output_kind=kind, stream_interval=3)
    sent = []
    for count in range(1, 10):
        end = [ended("r")] if count == 9 else []
        processor.process(step([("r", [A])], finished=end), now=1.0)
        if processor.stream_output("r") is not None:
            sent.append(count)
    assert sent == [1, 4, 7, 9]


def test_a_stream_tells_of_an_abort() -> None:
    for tokens in ([], [A]):
        processor = make("r", output_kind=RequestOutputKind.DELTA, stop="az")
        if tokens:
            processor.process(step([("r", tokens)]), now=1.0)
            assert take(processor).outputs[0].text == ""
        processor.abort(["r"], now=2.0)
        output = take(processor)
        assert (output.finished, output.outputs[0].finish_reason, output.outputs[0].text) == (
            True,
            "abort",
            "a" * len(tokens),
        )
        assert processor.stream_output("r") is None


def test_txt_06_a_stream_gets_held_back_text_with_its_end() -> None:
    processor = make("r", output_kind=RequestOutputKind.DELTA, stop="xdz")
    for token_id in (A, C, D):
        processor.process(step([("r", [token_id])]), now=1.0)
    assert take(processor).outputs[0].text == "a"
    processor.process(step(finished=[ended("r")]), now=1.0)
    assert take(processor).outputs[0].text == "xd"


def test_a_delta_does_not_copy_the_prompt_and_a_whole_output_does() -> None:
    processor, prompt = OutputProcessor(TOKENIZER), TokenizedPrompt(None, [A, B])
    processor.add("r", prompt, SamplingParams(output_kind=RequestOutputKind.DELTA), 1.0, ["r"])
    processor.process(step([("r", [A])]), now=1.0)
    assert take(processor).prompt_token_ids is prompt.token_ids
    processor.pop("r").prompt_token_ids.clear()
    assert prompt.token_ids == [A, B]


Turn = tuple[Sequence[tuple[int, Sequence[int]]], Sequence[int], bool]


@st.composite
def turns(draw: st.DrawFn, n: int) -> list[Turn]:
    """Steps as (tokens of choices, choices that end, whether the stream is asked then); all choices end."""
    left, found = set(range(n)), list[Turn]()
    while left:
        rows = [
            (index, draw(st.lists(st.integers(0, 270), min_size=1, max_size=3)))
            for index in sorted(left)
            if draw(st.booleans())
        ]
        ends = [index for index in sorted(left) if draw(st.integers(0, 5)) == 0 or len(found) > 10]
        left.difference_update(ends)
        found.append((rows, ends, draw(st.booleans())))
    return found


@settings(deadline=None)
@given(
    data=st.data(),
    n=st.integers(1, 3),
    kind=st.sampled_from(KINDS),
    interval=st.sampled_from([None, 1, 2, 4]),
    stop=st.sampled_from([None, "a", "ab"]),
)
def test_e9_what_a_stream_gets_is_the_whole_output_in_parts(
    data: st.DataObject, n: int, kind: RequestOutputKind, interval: int | None, stop: str | None
) -> None:
    processor = make("r", n=n, output_kind=kind, stream_interval=interval, stop=stop, logprobs=0)
    names = ["r"] if n == 1 else [f"{index}_r" for index in range(n)]
    sent: list[RequestOutput] = []
    for rows, ends, is_asked in data.draw(turns(n)):
        tokens = [token_id for _, row in rows for token_id in row]
        update = processor.process(
            step(
                [(names[index], row) for index, row in rows],
                finished=[ended(names[index]) for index in ends],
                logprobs=logprob_rows(list(enumerate(tokens))) if tokens else None,
            ),
            now=1.0,
        )
        assert set(update.touched) <= {"r"}
        if (is_asked or "r" in update.finished) and (output := processor.stream_output("r")) is not None:
            sent.append(output)
    assert processor.stream_output("r") is None
    whole = processor.pop("r")
    assert [output.finished for output in sent] == [False] * (len(sent) - 1) + [True]
    check_parts(sent, whole, kind, interval or 1)
    assert processor.num_unfinished == 0


def check_parts(sent: list[RequestOutput], whole: RequestOutput, kind: RequestOutputKind, interval: int) -> None:
    if kind is not RequestOutputKind.DELTA:
        assert sent[-1].outputs == whole.outputs
        for before, after in itertools.pairwise(sent):
            for one, other in zip(before.outputs, after.outputs, strict=True):
                assert other.text.startswith(one.text)
                assert other.token_ids[: len(one.token_ids)] == one.token_ids
        assert kind is RequestOutputKind.CUMULATIVE or len(sent) == 1
        return
    for choice in whole.outputs:
        parts = [part for output in sent for part in output.outputs if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [token for part in parts for token in part.token_ids] == choice.token_ids
        assert [position for part in parts for position in part.logprobs or []] == choice.logprobs
        assert [part.finish_reason for part in parts] == [None] * (len(parts) - 1) + [choice.finish_reason]
        assert parts[-1].cumulative_logprob == choice.cumulative_logprob
        assert all(len(part.token_ids) >= interval for part in parts[1:-1])


# Ids


def test_req_01_requests_with_one_label_are_two_requests() -> None:
    processor = OutputProcessor(TOKENIZER)
    prompt = TokenizedPrompt("x", [C])
    for request_id in ("0", "1"):
        processor.add(request_id, prompt, SamplingParams(), 1.0, [request_id], label="mine")
    processor.process(step([("0", [A]), ("1", [B])]), now=1.0)
    processor.process(step([("0", [A]), ("1", [B])], finished=[ended("0"), ended("1")]), now=1.0)
    outputs = [processor.pop("0"), processor.pop("1")]
    assert [(output.request_id, output.outputs[0].text) for output in outputs] == [("mine", "aa"), ("mine", "cc")]


def test_tokens_of_requests_that_nobody_waits_for_are_dropped() -> None:
    processor = make("r")
    update = processor.process(step([("gone", [A, B]), ("r", [C])], finished=[ended("gone")]), now=1.0)
    assert (list(update.touched), list(update.finished), update.num_new_tokens) == (["r"], [], 1)


def test_a_request_that_ends_without_a_token_is_touched_and_finished() -> None:
    processor = make("r")
    update = processor.process(step(finished=[ended("r", "abort", stop_reason="deadline")]), now=1.0)
    assert (list(update.touched), list(update.finished), list(update.stopped)) == (["r"], ["r"], [])
    assert completion_of(processor).stop_reason == "deadline"
