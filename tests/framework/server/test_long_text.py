"""Text that cannot fit the model costs no tokenizing: it is refused by its length, wherever it is given."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import tokenizers
from chat_calls import Body, refused, user
from http_server import ThreadServer
from tokenyard.errors import ValidationError
from tokenyard.front_end import ChatOptions

TEXT = "{" * (7 * 2**20)


class ShortTextsOnly:
    """A tokenizer of the library that has no time for long ones."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)

    def encode(self, text: str, **options: bool) -> tokenizers.Encoding:
        (encoding,) = self.encode_batch([text], **options)
        return encoding

    def encode_batch(self, texts: list[str], **options: bool) -> list[tokenizers.Encoding]:
        assert max(map(len, texts)) < 2**20, "a long text is encoded"
        return self._backend.encode_batch(texts, **options)


@pytest.fixture(autouse=True)
def _no_time(server: ThreadServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    tokenizer = server.llm.front.tokenizer
    monkeypatch.setattr(tokenizer, "_backend", ShortTextsOnly(tokenizer._backend))
    copy = tokenizer._guard._aliased_copy()
    monkeypatch.setattr(copy, "_backend", ShortTextsOnly(copy._backend))
    return


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/completions", {"prompt": ["hi", TEXT]}),
        ("/v1/chat/completions", {"messages": user(TEXT)}),
        ("/v1/chat/completions", {"messages": user("<|im_end|>" + TEXT)}),
        ("/tokenize", {"prompt": TEXT}),
        ("/tokenize", {"messages": user(TEXT)}),
    ],
    ids=["completion", "one of two", "chat", "chat with a control token's name", "tokenize", "tokenize a chat"],
)
def test_d17_d22_seven_megabytes_are_refused_before_they_are_encoded(
    server: ThreadServer, path: str, body: Body
) -> None:
    error = refused(server, body, path=path)
    assert error["param"] == ("messages" if "messages" in body else "prompt")
    limit = server.llm.front.model_config.max_model_len
    assert f"leaves room for {limit - 1} tokens" in error["message"]
    assert "model.max_model_len" in error["message"]
    assert "is text of 73400" in error["message"]


@pytest.mark.parametrize(
    "tokenize",
    [
        lambda front: front.tokenize(TEXT),
        lambda front: front.tokenize({"prompt": TEXT, "cache_salt": "a"}),
        lambda front: front.tokenize_chat(user(TEXT), ChatOptions()),
    ],
    ids=["prompt", "dict", "chat"],
)
def test_d17_the_same_holds_offline(server: ThreadServer, tokenize: Callable[[object], object]) -> None:
    with pytest.raises(ValidationError, match="is text of 73400"):
        tokenize(server.llm.front)


def test_a_text_that_may_fit_is_counted_exactly(server: ThreadServer) -> None:
    limit = server.llm.front.model_config.max_model_len
    error = refused(server, {"prompt": "hi" * limit}, path="/v1/completions")
    assert f"the prompt has {limit} tokens" in error["message"]
