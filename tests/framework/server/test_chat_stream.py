"""/v1/chat/completions as a stream: the shape of its chunks, and that they say what the whole answer says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_calls import (
    EOS,
    HI,
    SCRIPTED,
    Body,
    byte_ids,
    chat,
    choices_of,
    chunks,
    content_of,
    installed,
    logprobs_of,
    post,
    refused,
    say,
    user,
)
from http_server import ThreadServer, running_server

GREEDY: Body = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
CHARACTER = "両".encode()


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    with installed("script"), running_server([SCRIPTED], model=tiny_llama_dir) as running:
        yield running


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"n": 2, "seed": 5, "temperature": 1}, {"logprobs": True}])
def test_api_11_a_choice_has_its_role_then_its_content_then_its_end(server: ThreadServer, fields: Body) -> None:
    """API-11: one finish reason for each index, null before it, and no text beside it."""
    fields = {**GREEDY, "max_tokens": 5, **fields}
    found = chunks(server, **fields)
    assert {chunk["object"] for chunk in found} == {"chat.completion.chunk"}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in found}) == 1
    for index in range(fields.get("n", 1)):
        first, *contents, last = choices_of(found, index)
        assert first["delta"] == {"role": "assistant", "content": "", "refusal": None}
        assert all(set(content["delta"]) == {"content"} and content["delta"]["content"] for content in contents)
        assert last["delta"] == {}
        assert last["finish_reason"] == "length"
        assert all(choice["finish_reason"] is None for choice in (first, *contents))


@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"n": 3, "seed": 5, "temperature": 1.0}, {"stop": "ih"}])
def test_a2_the_contents_together_are_the_whole_answer(server: ThreadServer, fields: Body) -> None:
    fields = {**GREEDY, "max_tokens": 24, "return_token_ids": True, **fields}
    whole, found = chat(server, **fields), chunks(server, **fields)
    for choice in whole["choices"]:
        index = choice["index"]
        assert content_of(found, index) == choice["message"]["content"]
        parts = [part.get("token_ids", []) for part in choices_of(found, index)]
        assert [token_id for part in parts for token_id in part] == choice["token_ids"]
        assert choices_of(found, index)[-1]["finish_reason"] == choice["finish_reason"]
    assert found[0]["prompt_token_ids"] == whole["prompt_token_ids"]
    assert not any("prompt_token_ids" in chunk for chunk in found[1:])


@pytest.mark.parametrize("seed", range(4))
def test_logprobs_come_with_the_text_of_their_tokens(server: ThreadServer, seed: int) -> None:
    """A random model says many bytes that are no whole characters: their entries wait for the text."""
    fields: Body = {"seed": seed, "temperature": 1.5, "max_tokens": 40, "ignore_eos": True, "n": 2}
    fields |= {"logprobs": True, "top_logprobs": 2}
    whole, found = chat(server, **fields), chunks(server, **fields)
    for choice in whole["choices"]:
        assert logprobs_of(found, choice["index"]) == choice["logprobs"]["content"]
        *contents, _ = choices_of(found, choice["index"])[1:]
        assert all(part["logprobs"]["content"] for part in contents)


def test_the_tokens_of_a_character_that_comes_in_bytes_come_with_its_text(server: ThreadServer) -> None:
    """How many tokens share a chunk depends on how fast the client reads; a character is never cut."""
    assert len(byte_ids(CHARACTER)) == 3
    found = chunks(server, logprobs=True, return_token_ids=True, **say(HI, *byte_ids(CHARACTER), EOS))
    parts = choices_of(found)[1:]
    assert "".join(part["delta"].get("content", "") for part in parts) == "hi両"
    assert [token_id for part in parts for token_id in part["token_ids"]] == [HI, *byte_ids(CHARACTER), EOS]
    (character,) = [part for part in parts if "両" in part["delta"].get("content", "")]
    # Its first bytes may share a chunk with what is before them; its text waits for the last one.
    assert byte_ids(CHARACTER)[-1] in character["token_ids"]
    assert all(len(part["logprobs"]["content"]) == len(part["token_ids"]) for part in parts if part["token_ids"])
    assert parts[-1]["finish_reason"] == "stop"


USAGE = {"include_usage": True}


@pytest.mark.parametrize(
    "options", [None, {}, {"include_usage": False}, {"include_usage": False, "continuous_usage_stats": True}]
)
def test_api_08_usage_is_null_where_it_was_not_asked_for(server: ThreadServer, options: Body | None) -> None:
    """API-08, A3."""
    fields = {} if options is None else {"stream_options": options}
    found = chunks(server, **GREEDY, **fields)
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in found)


def test_api_08_usage_that_was_asked_for_is_one_more_chunk(server: ThreadServer) -> None:
    """API-08, A3, API-09: equal to that of the whole answer, with all choices counted."""
    fields = {**GREEDY, "n": 2}
    *others, last = chunks(server, stream_options=USAGE, **fields)
    assert all(chunk["usage"] is None for chunk in others)
    assert last["choices"] == []
    whole = chat(server, **fields)["usage"]
    assert {**last["usage"], "prompt_tokens_details": None} == {**whole, "prompt_tokens_details": None}


def test_a3_continuous_usage_counts_up_to_the_end(server: ThreadServer) -> None:
    found = chunks(server, stream_options={**USAGE, "continuous_usage_stats": True}, n=2, **GREEDY)
    counts = [chunk["usage"]["completion_tokens"] for chunk in found]
    assert counts == sorted(counts)
    assert counts[-1] == counts[-2] == 16
    for usage in (chunk["usage"] for chunk in found):
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]


def test_api_08_options_of_a_stream_need_a_stream(server: ThreadServer) -> None:
    for body in ({"stream_options": USAGE}, {"stream_options": {}, "stream": False}):
        assert refused(server, {"messages": user("hi"), **body})["param"] == "stream_options"


def test_cached_tokens_are_told_in_the_stream_as_in_the_answer(server: ThreadServer) -> None:
    long = user("the hi " * 20)
    first = chunks(server, long, stream_options=USAGE, **GREEDY)[-1]["usage"]
    second = chunks(server, long, stream_options=USAGE, **GREEDY)[-1]["usage"]
    assert first["prompt_tokens_details"]["cached_tokens"] < second["prompt_tokens_details"]["cached_tokens"]
    assert second == chat(server, long, **GREEDY)["usage"]


def test_an_echoed_message_is_the_first_content(server: ThreadServer) -> None:
    begun = [*user("hi"), {"role": "assistant", "content": "he hi"}]
    found = chunks(server, begun, echo=True, continue_final_message=True, n=2, **say(HI, EOS))
    for index in range(2):
        assert [part["delta"].get("content") for part in choices_of(found, index)] == ["", "he hi", "hi", None]


def test_the_prompts_text_is_in_the_first_chunk(server: ThreadServer) -> None:
    first, *others = chunks(server, return_prompt_text=True, **GREEDY)
    assert first["prompt_text"].endswith("<|im_start|>assistant\n")
    assert not any("prompt_text" in chunk for chunk in others)


def test_the_last_chunks_have_the_fingerprint_of_the_whole_answer(server: ThreadServer) -> None:
    *_, end, usage = chunks(server, stream_options=USAGE, service_tier="auto", **GREEDY)
    fingerprint = chat(server, **GREEDY)["system_fingerprint"]
    assert end["system_fingerprint"] == usage["system_fingerprint"] == fingerprint
    assert end["service_tier"] == usage["service_tier"] == "default"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 0}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"messages": []}, "messages"),
        ({"messages": user("hi" * 400)}, "messages"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs"),
    ],
)
def test_api_13_a_stream_that_is_refused_is_a_plain_error(server: ThreadServer, fields: Body, param: str) -> None:
    """API-13: never status 200 with an error in the stream, even for what only the engine's front end refuses."""
    assert refused(server, {"messages": user("hi"), "stream": True, **fields})["param"] == param


def test_api_13_a_stream_that_fails_later_ends_with_an_error_and_done(server: ThreadServer) -> None:
    fields = {"extra_args": {"say": [HI] * 9, "fail_after": 3}, "stream": True}
    status, text = post(server, {"messages": user("hi"), **fields})
    *events, error, done, _ = text.split("\n\n")
    assert (status, done) == (200, "data: [DONE]")
    told = json.loads(error.removeprefix("data: "))["error"]
    assert (told["type"], told["code"]) == ("InternalServerError", 500)
    assert "0x" not in told["message"]
    assert content_of([json.loads(event.removeprefix("data: ")) for event in events]) == "hi" * 3
