"""What /v1/chat/completions refuses, with which words; and that the server is none the worse for it."""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from chat_calls import Body, chat, chunks, post, refused, user
from http_server import ThreadServer, running_server
from tokenyard.model.template_variables import MAX_TOOLS
from tokenyard.server.protocol.chat import MAX_MESSAGES, UNSUPPORTED

ONE: Body = {"max_tokens": 1}
TOOL = {"type": "function", "function": {"name": "f"}}


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    with running_server(["server.max_n=4"], model=tiny_llama_dir) as running:
        yield running


@pytest.fixture(autouse=True)
def _answers_afterwards(server: ThreadServer) -> Iterator[None]:
    yield
    assert chat(server, **ONE)["usage"]["completion_tokens"] == 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": -5}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_completion_tokens": 0, "max_tokens": 3}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 5}, "n"),
        ({"n": 10**9}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": 2.5}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"logprobs": True, "top_logprobs": 100000}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": -1}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": True}, "top_logprobs"),
        ({"logprobs": 1}, "logprobs"),
        ({"logprobs": "yes"}, "logprobs"),
        ({"messages": []}, "messages"),
        ({"stop": ""}, "stop"),
        ({"stop": ["x"] * 17}, "stop"),
        ({"seed": 1.5}, "seed"),
        ({"stream": 1}, "stream"),
        ({"model": 3}, "model"),
        ({"echo": "true"}, "echo"),
        ({"user": 3}, "user"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"99999": 1}}, "logit_bias"),
        ({"add_generation_prompt": "no"}, "add_generation_prompt"),
        ({"chat_template": 3}, "chat_template"),
        ({"reasoning_effort": "all"}, "reasoning_effort"),
        ({"tool_choice": 3}, "tool_choice"),
    ],
)
def test_api_02_values_that_mean_nothing_are_named(server: ThreadServer, fields: Body, param: str) -> None:
    assert refused(server, {"messages": user("hi"), **fields})["param"] == param


@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b"3", b"{", b'{"messages": NaN}', b"\xff\xfe", b"{}", b'{"messages": [{"role": "user"'],
)
def test_api_02_bodies_that_are_no_request_are_refused(server: ThreadServer, body: bytes) -> None:
    status, text = post(server, body)
    assert status in (400, 415), text
    assert json.loads(text)["error"]["type"] in ("BadRequestError", "UnsupportedMediaTypeError")


ASKED = {
    "add_special_tokens": True,
    "audio": {"voice": "alloy", "format": "wav"},
    "best_of": 2,
    "documents": [{"text": "x"}],
    "function_call": {"name": "f"},
    "functions": [{"name": "f"}],
    "guided_json": {"type": "object"},
    "include_reasoning": False,
    "kv_transfer_params": {"do_remote_decode": True},
    "logits_processors": ["gASVKAAAAAAAAACMBXBvc2l4lIwGc3lzdGVt"],
    "media_io_kwargs": {"image": {}},
    "mm_processor_kwargs": {"x": 1},
    "modalities": ["text", "audio"],
    "moderation": {"model": "x"},
    "prediction": {"type": "content", "content": "x"},
    "prompt_embeds": "AAAA",
    "repetition_detection": {"max_pattern_size": 3},
    "response_format": {"type": "json_object"},
    "store": True,
    "structured_outputs": {"json": {}},
    "thinking_token_budget": 10,
    "truncate_prompt_tokens": 4,
    "use_beam_search": True,
    "verbosity": "low",
    "web_search_options": {},
}


@pytest.mark.parametrize("name", sorted({*ASKED, *UNSUPPORTED} - {"parallel_tool_calls"}))
def test_a_feature_that_is_not_there_is_refused_by_name(server: ThreadServer, name: str) -> None:
    """A8, D21 among them: neither a serialized processor nor transfer parameters are looked at."""
    error = refused(server, {"messages": user("hi"), name: ASKED[name]})
    assert error["param"] == name
    assert "not available in this version" in error["message"]


def test_tools_are_refused_by_name_as_long_as_no_call_is_parsed(server: ThreadServer) -> None:
    for fields, param in (
        ({"tools": [TOOL]}, "tools"),
        ({"tools": [TOOL], "tool_choice": "auto"}, "tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice"),
    ):
        error = refused(server, {"messages": user("hi"), **fields})
        assert (error["param"], "tool_choice" in error["message"] or "allowed" in error["message"]) == (param, True)


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "text"}},
        {"modalities": ["text"]},
        {"functions": [], "function_call": "none"},
        {"tools": [], "tool_choice": "auto", "parallel_tool_calls": False},
        {"store": False, "include_reasoning": True, "best_of": 1, "use_beam_search": False},
        {"add_special_tokens": False, "documents": []},
    ],
)
def test_values_that_ask_for_nothing_are_taken(server: ThreadServer, fields: Body) -> None:
    assert chat(server, **ONE, **fields)["choices"]


def test_a_field_that_nobody_knows_is_taken_and_told_in_the_log_once(
    server: ThreadServer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            chat(server, nonsense_of_mine={"a": 1}, **ONE)
    told = [record.getMessage() for record in caplog.records if "nonsense_of_mine" in record.getMessage()]
    assert len(told) == 1


def test_d22_messages_and_tools_are_limited(server: ThreadServer) -> None:
    """One more than the limit is refused for that; the limit itself for what comes next, the length of the prompt."""
    few = [{"role": "user", "content": ""}] * MAX_MESSAGES
    assert "model.max_model_len" in refused(server, {"messages": few})["message"]
    error = refused(server, {"messages": [*few, *user("")]})
    assert (error["param"], str(MAX_MESSAGES) in error["message"]) == ("messages", True)
    for count, says in ((MAX_TOOLS, "no place for tools"), (MAX_TOOLS + 1, f"at most {MAX_TOOLS}")):
        error = refused(server, {"messages": user("hi"), "tools": [TOOL] * count, "tool_choice": "none"})
        assert (error["param"], says in error["message"]) == ("tools", True)


def test_d22_a_message_nested_without_end_is_refused(server: ThreadServer) -> None:
    deep: object = []
    for _ in range(60):
        deep = [deep]
    assert "nested" in refused(server, {"messages": [{"role": "user", "content": "hi", "x": deep}]})["message"]


def test_d17_a_megabyte_of_braces_is_refused_and_others_are_served_meanwhile(server: ThreadServer) -> None:
    for text in ("{" * 2**20, "<tool_call>" * 90_000, "<|im_start|>" * 80_000):
        with ThreadPoolExecutor(1) as pool:
            long = pool.submit(refused, server, {"messages": user(text)})
            assert chat(server, **ONE)["choices"]
            assert "max_model_len" in long.result()["message"]
    assert post(server, b"{" * 2**20)[0] in (400, 413)


@pytest.mark.parametrize("kind", ["image_url", "audio_url", "video_url", "input_image", "file"])
def test_f1_no_url_in_a_request_is_ever_fetched(server: ThreadServer, kind: str) -> None:
    """F1: a listener on loopback receives nothing, wherever the URL stands."""
    with socket.create_server(("127.0.0.1", 0)) as canary:
        url = f"http://127.0.0.1:{canary.getsockname()[1]}/x.png"
        error = refused(server, {"messages": user([{"type": kind, kind: {"url": url}, "url": url}])})
        assert error["param"] == "messages[0].content[0]"
        chat(server, user(f"![x]({url}) <img src='{url}'>"), **ONE)
        chat(server, [{"role": "user", "content": "hi", "image_url": url, "name": url}], **ONE)
        canary.settimeout(0)
        with pytest.raises(BlockingIOError):
            canary.accept()


def test_a_prompt_that_leaves_no_room_is_refused_with_its_length(server: ThreadServer) -> None:
    """API-05, for chats: as a whole answer and as a stream; a prompt that leaves one token gets that."""
    limit = server.llm.front.model_config.max_model_len
    around = chat(server, user(""), **ONE)["usage"]["prompt_tokens"]
    for spare in (0, -1):
        error = refused(server, {"messages": user("hi" * (limit - around - spare))})
        assert f"the prompt has {limit - spare} tokens" in error["message"]
    last = chat(server, user("hi" * (limit - around - 1)), ignore_eos=True)
    assert (last["usage"]["completion_tokens"], last["choices"][0]["finish_reason"]) == (1, "length")
    assert chunks(server, user("hi" * (limit - around - 1)), ignore_eos=True)[-1]["choices"][0]["finish_reason"]


def test_many_refusals_at_once_leave_nothing_behind(server: ThreadServer) -> None:
    bodies: list[Body] = [{"messages": user("hi"), "n": 99}, {"messages": user("hi" * 300)}, {"messages": []}]
    barrier = threading.Barrier(8)

    def ask(number: int) -> int:
        barrier.wait()
        return sum(post(server, bodies[(number + place) % 3])[0] for place in range(12))

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(ask, range(8))) == [12 * 400] * 8
    server.wait_until_idle()
