"""/v1/chat/completions, answered whole: what is in an answer, and what a request decides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_calls import HI, SCRIPTED, Body, byte_ids, chat, installed, refused, say, user
from http_server import ThreadServer, running_server
from tokenyard.server.protocol.chat import UNSUPPORTED, ChatRequest

GREEDY: Body = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
MAX_LEN = 128
EOS = [2, 0]  # of the tiny model: <|im_end|> and <|endoftext|>


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    overrides = ["server.served_model_name=[tiny,other]", f"model.max_model_len={MAX_LEN}", SCRIPTED]
    with installed("script"), running_server(overrides, model=tiny_llama_dir) as running:
        yield running


def message(answer: Body, index: int = 0) -> str:
    text: str = answer["choices"][index]["message"]["content"]
    return text


def test_an_answer_has_every_field_of_openais_and_vllms(server: ThreadServer) -> None:
    answer = chat(server, **GREEDY)
    assert answer["id"].startswith("chatcmpl-")
    assert answer["object"] == "chat.completion"
    assert answer["model"] == "tiny"
    assert set(answer) == {
        *("id", "object", "created", "model", "choices", "usage", "service_tier", "system_fingerprint"),
        *("prompt_logprobs", "prompt_token_ids", "prompt_text", "kv_transfer_params"),
    }
    (choice,) = answer["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason", "stop_reason", "token_ids"}
    assert (choice["index"], choice["finish_reason"], choice["stop_reason"]) == (0, "length", None)
    said = choice["message"]
    assert set(said) == {"role", "content", "refusal", "annotations", "audio", "function_call", "reasoning"}
    assert (said["role"], said["refusal"], said["annotations"]) == ("assistant", None, [])
    usage = answer["usage"]
    assert usage["completion_tokens"] == 8
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    assert set(usage["prompt_tokens_details"]) == {"cached_tokens"}


def test_the_fingerprint_is_that_of_the_server_and_every_id_is_new(server: ThreadServer) -> None:
    one, two = chat(server, **GREEDY), chat(server, **GREEDY)
    assert one["system_fingerprint"] == two["system_fingerprint"]
    assert one["id"] != two["id"]
    assert message(one) == message(two)


def test_max_completion_tokens_wins_over_max_tokens(server: ThreadServer) -> None:
    answer = chat(server, temperature=0, ignore_eos=True, max_tokens=9, max_completion_tokens=3)
    assert answer["usage"]["completion_tokens"] == 3


def test_without_a_limit_an_answer_may_fill_the_context(server: ThreadServer) -> None:
    answer = chat(server, temperature=0, ignore_eos=True)
    assert answer["usage"]["total_tokens"] == MAX_LEN
    assert answer["choices"][0]["finish_reason"] == "length"


def test_a4_n_choices_have_their_indices_and_greedy_ones_are_equal(server: ThreadServer) -> None:
    """A4, API-09: the prompt counts once, completion tokens are summed."""
    answer = chat(server, n=3, **GREEDY)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert {message(answer, index) for index in range(3)} == {message(chat(server, **GREEDY))}
    alone = chat(server, **GREEDY)["usage"]
    assert answer["usage"]["prompt_tokens"] == alone["prompt_tokens"]
    assert answer["usage"]["completion_tokens"] == 3 * 8


def test_a4_n_with_a_seed_gives_different_choices_that_come_again(server: ThreadServer) -> None:
    fields: Body = {"n": 3, "seed": 7, "max_tokens": 8, "ignore_eos": True}
    first, second = chat(server, **fields), chat(server, **fields)
    texts = [message(first, index) for index in range(3)]
    assert texts == [message(second, index) for index in range(3)]
    assert len(set(texts)) == 3


@pytest.mark.parametrize("eos", EOS)
def test_req_06_each_choice_stops_where_the_request_alone_stops(server: ThreadServer, eos: int) -> None:
    """REQ-06: a model with two end-of-sequence ids, max_tokens left out."""
    ending = {"temperature": 0, **say(HI, HI, eos)}
    alone, both = chat(server, **ending), chat(server, n=2, **ending)
    assert message(alone) == "hihi"
    for index in range(2):
        assert (message(both, index), both["choices"][index]["finish_reason"]) == ("hihi", "stop")
    assert both["usage"]["completion_tokens"] == 2 * alone["usage"]["completion_tokens"] == 6


def test_a_stop_string_ends_the_text_and_is_the_reason(server: ThreadServer) -> None:
    answer = chat(server, max_tokens=9, stop="ih", **say(HI, HI, HI))
    assert (message(answer), answer["choices"][0]["stop_reason"]) == ("h", "ih")
    kept = chat(server, max_tokens=9, stop=["ih"], include_stop_str_in_output=True, **say(HI, HI, HI))
    assert message(kept) == "hih"


@pytest.mark.parametrize("top", [{}, {"top_logprobs": None}, {"top_logprobs": 0}], ids=["absent", "null", "zero"])
def test_api_14_logprobs_alone_have_no_alternatives(server: ThreadServer, top: Body) -> None:
    answer = chat(server, logprobs=True, **top, **GREEDY)
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 8
    assert all(entry["top_logprobs"] == [] and entry["logprob"] <= 0 for entry in content)


def test_api_14_top_logprobs_need_logprobs(server: ThreadServer) -> None:
    error = refused(server, {"messages": user("hi"), "top_logprobs": 5})
    assert error["param"] == "top_logprobs"
    assert "needs logprobs=true" in error["message"]
    assert chat(server, top_logprobs=0, **GREEDY)["choices"][0]["logprobs"] is None


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("count", [1, 5, 20])
def test_api_15_there_are_always_as_many_alternatives_as_were_asked_for(
    server: ThreadServer, temperature: int, count: int
) -> None:
    """API-15: the chosen token has its own logprob, and is among the alternatives where it is ranked there."""
    fields = {**GREEDY, "temperature": temperature, "seed": 3}
    answer = chat(server, logprobs=True, top_logprobs=count, return_tokens_as_token_ids=True, **fields)
    for entry in answer["choices"][0]["logprobs"]["content"]:
        found = {one["token"]: one["logprob"] for one in entry["top_logprobs"]}
        assert len(found) == len(entry["top_logprobs"]) == count
        numbers = [one["logprob"] for one in entry["top_logprobs"]]
        assert numbers == sorted(numbers, reverse=True)
        assert (entry["token"] in found) == (entry["logprob"] >= numbers[-1])
        if entry["token"] in found:
            assert found[entry["token"]] == entry["logprob"]
        if temperature == 0:
            assert entry["logprob"] == numbers[0]


def test_logprobs_spell_each_token_and_its_bytes(server: ThreadServer) -> None:
    """The end-of-sequence token has an entry as the others have."""
    answer = chat(server, logprobs=True, **say(HI, *byte_ids(b"\xe4\xbd"), EOS[0]))
    entries = answer["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in entries] == ["hi", "bytes:\\xe4", "bytes:\\xbd", "<|im_end|>"]
    assert [bytes(entry["bytes"]) for entry in entries] == [b"hi", b"\xe4", b"\xbd", b"<|im_end|>"]
    assert len(entries) == answer["usage"]["completion_tokens"]


def test_token_ids_and_the_prompts_text_come_when_asked_for(server: ThreadServer) -> None:
    answer = chat(server, return_token_ids=True, return_prompt_text=True, **say(HI, HI, EOS[0]))
    assert answer["choices"][0]["token_ids"] == [HI, HI, EOS[0]]
    assert len(answer["prompt_token_ids"]) == answer["usage"]["prompt_tokens"]
    assert answer["prompt_text"] == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_prompt_logprobs_have_an_entry_for_each_prompt_token(server: ThreadServer) -> None:
    answer = chat(server, prompt_logprobs=1, return_token_ids=True, **GREEDY)
    first, *others = answer["prompt_logprobs"]
    assert first is None
    for token_id, position in zip(answer["prompt_token_ids"][1:], others, strict=True):
        assert position[str(token_id)]["logprob"] <= 0


def test_an_answer_that_is_gone_on_with_can_be_shown_whole(server: ThreadServer) -> None:
    """`echo` puts the message before the text that goes on with it; a message of another role is not an answer's."""
    begun = [*user("hi"), {"role": "assistant", "content": "he hi"}]
    fields = {"continue_final_message": True, **say(HI, EOS[0])}
    assert message(chat(server, begun, **fields)) == "hi"
    assert message(chat(server, begun, echo=True, **fields)) == "he hihi"
    assert message(chat(server, user("the"), echo=True, **say(HI, EOS[0]))) == "hi"


def test_the_answer_has_the_role_of_the_message_that_it_goes_on_with(server: ThreadServer) -> None:
    fields = {"continue_final_message": True, "add_generation_prompt": False, **say(HI, EOS[0])}
    answer = chat(server, user("hi"), return_prompt_text=True, **fields)
    assert answer["choices"][0]["message"]["role"] == "user"
    assert answer["prompt_text"] == "<|im_start|>user\nhi"


def test_a_service_tier_is_answered_with_the_one_there_is(server: ThreadServer) -> None:
    assert chat(server, service_tier="auto", **GREEDY)["service_tier"] == "default"
    assert chat(server, **GREEDY)["service_tier"] is None
    assert refused(server, {"messages": user("hi"), "service_tier": "flex"})["param"] == "service_tier"


def test_fields_that_are_null_say_nothing(server: ThreadServer) -> None:
    nulls = dict.fromkeys(ChatRequest.model_fields.keys() - {"messages"} | UNSUPPORTED.keys())
    assert message(chat(server, **{**nulls, **GREEDY})) == message(chat(server, **GREEDY))
