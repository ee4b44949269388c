"""/tokenize and /detokenize."""

from __future__ import annotations

import pytest
from completion_calls import Json, post, refused
from http_server import ThreadServer

CHAT = [{"role": "user", "content": "hi the"}]
SPECIAL = "<|im_start|>hi<|im_end|> 世界"


def tokenize(server: ThreadServer, **body: object) -> Json:
    status, answer = post(server, "/tokenize", **body)
    assert status == 200, answer
    return answer


def detokenize(server: ThreadServer, **body: object) -> str:
    status, answer = post(server, "/detokenize", **body)
    assert status == 200, answer
    return str(answer["prompt"])


@pytest.mark.parametrize("text", ["the hi", "", SPECIAL, "a" * 1000])
def test_the_ids_of_a_text_are_those_of_its_completion(server: ThreadServer, text: str) -> None:
    ids = server.llm.front.tokenizer.encode(text)
    answer = tokenize(server, prompt=text)
    assert answer == {"count": len(ids), "max_model_len": 256, "tokens": ids, "token_strs": None}


def test_tokens_come_as_the_vocabulary_spells_them_if_asked_for(server: ThreadServer) -> None:
    answer = tokenize(server, prompt="hi the", return_token_strs=True)
    assert answer["token_strs"] == ["hi", "Ġthe"]
    assert answer["count"] == 2


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_generation_prompt": False},
        {"continue_final_message": True},
        {"add_special_tokens": False},
    ],
    ids=str,
)
def test_the_ids_of_a_conversation_are_those_of_its_answer(server: ThreadServer, options: dict[str, bool]) -> None:
    adds = options.get("add_generation_prompt", not options.get("continue_final_message"))
    expected = server.llm.front.tokenizer.encode_chat(
        CHAT, add_generation_prompt=adds, continue_final_message=bool(options.get("continue_final_message"))
    )
    assert tokenize(server, messages=CHAT, **options)["tokens"] == expected


def test_text_comes_back_from_its_ids(server: ThreadServer) -> None:
    ids = tokenize(server, prompt=SPECIAL)["tokens"]
    assert detokenize(server, tokens=ids) == SPECIAL
    assert detokenize(server, tokens=ids, skip_special_tokens=True) == "hi 世界"
    assert detokenize(server, tokens=[]) == ""


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"prompt": None},
        {"prompt": "hi", "messages": CHAT},
        {"prompt": 5},
        {"prompt": [5]},
        {"messages": []},
        {"messages": [5]},
        {"messages": "hi"},
        {"messages": [{"role": "nobody", "content": "hi"}]},
        {"messages": CHAT * 2049},
        {"messages": CHAT, "add_special_tokens": True},
        {"messages": CHAT, "continue_final_message": True, "add_generation_prompt": True},
        {"messages": CHAT, "chat_template": "{{ 1 }}"},
        {"messages": CHAT, "chat_template_kwargs": 5},
        {"prompt": "hi", "add_special_tokens": "yes"},
    ],
    ids=lambda body: str(body)[:60],
)
def test_api_02_what_is_no_text_and_no_conversation_is_refused(server: ThreadServer, body: dict[str, object]) -> None:
    assert refused(server, "/tokenize", **body)


@pytest.mark.parametrize(
    "tokens", [[-1], [265], [10**30], [1.5], ["1"], [True], [None], 5, "5", None, [[1]], {"0": 1}], ids=str
)
def test_api_02_d9_ids_outside_the_vocabulary_are_refused(server: ThreadServer, tokens: object) -> None:
    assert refused(server, "/detokenize", tokens=tokens)["param"] == "tokens"


def test_an_unknown_model_is_404(server: ThreadServer) -> None:
    for path, body in (("/tokenize", {"prompt": "hi"}), ("/detokenize", {"tokens": [5]})):
        status, answer = post(server, path, model="another", **body)
        assert (status, answer["error"]["type"]) == (404, "NotFoundError")
