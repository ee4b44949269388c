"""/v1/models, and the model's name in requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from chat_calls import chat, post, refused, user
from http_server import ThreadServer, running_server

NAMES = ["tiny", "org/other-name", "mit Leerzeichen"]
ONE = {"max_tokens": 1}


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    names = ",".join(f"'{name}'" for name in NAMES)
    overrides = [f"server.served_model_name=[{names}]", "model.max_model_len=64"]
    with running_server(overrides, model=tiny_llama_dir) as running:
        yield running


def test_there_is_a_card_for_each_served_name(server: ThreadServer, tiny_llama_dir: Path) -> None:
    status, text = server.get("/v1/models")
    listed = json.loads(text)
    assert (status, listed["object"]) == (200, "list")
    assert [card["id"] for card in listed["data"]] == NAMES
    for card in listed["data"]:
        assert set(card) == {"id", "object", "created", "owned_by", "root", "parent", "max_model_len", "permission"}
        assert (card["object"], card["owned_by"], card["max_model_len"]) == ("model", "tokenyard", 64)
        assert (card["root"], card["parent"], card["permission"]) == (str(tiny_llama_dir), None, [])


@pytest.mark.parametrize("name", NAMES)
def test_a_card_is_found_by_its_name_with_slashes_and_spaces(server: ThreadServer, name: str) -> None:
    assert server.client.models.retrieve(name).id == name


@pytest.mark.parametrize("name", ["nobody", "tin", "TINY", "tiny/", "../tiny", "x" * 5000])
def test_a_name_that_is_not_served_is_not_found(server: ThreadServer, name: str) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        server.client.models.retrieve(name)
    assert "served: tiny, org/other-name, mit Leerzeichen" in caught.value.message
    assert len(caught.value.message) < 600


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_requests_may_use_any_served_name_and_answers_have_it(server: ThreadServer, path: str) -> None:
    base = {"messages": user("hi"), "prompt": "hi", **ONE}
    for fields, expected in [({"model": name}, name) for name in NAMES] + [({}, "tiny"), ({"model": None}, "tiny")]:
        status, text = post(server, {**base, **fields}, path)
        assert (status, json.loads(text)["model"]) == (200, expected)


def test_an_unknown_model_is_a_404_that_names_the_served_ones(server: ThreadServer) -> None:
    error = refused(server, {"messages": user("hi"), "model": "tinny"}, status=404)
    assert (error["type"], error["param"]) == ("NotFoundError", "model")
    assert "did you mean 'tiny'" in error["message"]
    assert "served: tiny" in error["message"]
    assert refused(server, {"messages": user("hi"), "model": ""}, status=404)
    assert chat(server, **ONE)["model"] == "tiny"
