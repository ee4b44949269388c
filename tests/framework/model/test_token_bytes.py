"""TokenBytes: the bytes of every token, for each kind of decoder; and which kinds are known."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_tokenizers import byte_fallback, byte_level, metaspace, word_pieces
from tokenizers import decoders, models
from tokenyard.model.byte_stream import ByteStream
from tokenyard.model.files import resolve_model
from tokenyard.model.token_spelling import Spelling, spelling_of
from tokenyard.model.tokenizer import Tokenizer, load_tokenizer

COMPLETE = {"byte_level": byte_level(), "llama_like": byte_fallback(), "gemma_like": byte_fallback(strips=False)}
ALONE = {**COMPLETE, "metaspace": metaspace()}
WORD_PIECES = word_pieces()


def text_of(tokenizer: Tokenizer, ids: Sequence[int], prompt: Sequence[int]) -> str:
    stream = tokenizer.new_stream(False, prompt)
    return "".join([*(stream.step(token_id) for token_id in ids), stream.flush()])


@pytest.mark.parametrize("name", ALONE)
def test_txt_15_every_tokens_bytes_are_what_it_adds(name: str) -> None:
    tokenizer = ALONE[name]
    assert isinstance(tokenizer.new_stream(), ByteStream)
    anchor = tokenizer.encode("x")
    before = tokenizer.decode(anchor, skip_special_tokens=False)
    for token_id in range(tokenizer.vocab_size):
        added = tokenizer.decode([*anchor, token_id], skip_special_tokens=False).removeprefix(before)
        assert tokenizer.token_bytes(token_id).decode("utf-8", "replace") == added


@settings(deadline=None)
@given(text=st.text(max_size=30), tokenizer=st.sampled_from(list(COMPLETE.values())))
def test_txt_15_the_bytes_of_all_tokens_are_the_text(text: str, tokenizer: Tokenizer) -> None:
    prompt, ids = tokenizer.encode("\nx"), tokenizer.encode(text)
    assert b"".join(map(tokenizer.token_bytes, ids)).decode() == text_of(tokenizer, ids, prompt)


def test_txt_15_added_tokens_have_the_bytes_that_decoding_gives_them() -> None:
    backend = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(["é世", "a b", "é", "x"])
    tokenizer = Tokenizer(backend, {}, None)
    for token_id in range(5):
        assert tokenizer.token_bytes(token_id).decode("utf-8", "replace") == tokenizer.decode([token_id])


def test_txt_15_a_token_of_a_decoder_of_another_kind_has_the_bytes_it_has_alone() -> None:
    assert not isinstance(WORD_PIECES.new_stream(), ByteStream)
    assert WORD_PIECES.token_bytes(WORD_PIECES.token_to_id("世") or 0) == "世".encode()


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.CTC(),
        decoders.Strip(" ", 1, 0),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        decoders.Sequence([decoders.Fuse(), decoders.Replace("a", "b")]),
        decoders.Sequence([decoders.Replace(tokenizers.Regex("a+"), "b"), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 1)]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Strip("x", 1, 0)]),
    ],
)
def test_decoders_whose_tokens_depend_on_each_other_are_left_to_the_library(decoder: decoders.Decoder | None) -> None:
    backend = tokenizers.Tokenizer(models.BPE({"▁a": 0, "b</w>": 1, "a": 2, " x": 3, "<0x41>": 4}, []))
    if decoder is not None:
        backend.decoder = decoder
    tokenizer = Tokenizer(backend, {}, None)
    assert not isinstance(tokenizer.new_stream(), ByteStream)
    for ids in itertools.product(range(5), repeat=2):
        assert isinstance(text_of(tokenizer, ids, []), str)


@pytest.mark.parametrize("state", [None, 3, [], {}, {"type": "Sequence"}, {"type": "Sequence", "decoders": [1]}])
def test_a_decoder_in_an_unknown_form_has_no_spelling(state: object) -> None:
    assert spelling_of(state) is None


def test_the_spellings_of_the_usual_decoders_are_known() -> None:
    llama: list[dict[str, object]] = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    strip: dict[str, object] = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    marks = (("▁", " "),)
    assert spelling_of({"type": "ByteLevel"}) == Spelling(is_byte_level=True)
    assert spelling_of({"type": "Sequence", "decoders": llama}) == Spelling(has_byte_tokens=True, replacements=marks)
    assert spelling_of({"type": "Sequence", "decoders": [*llama, strip]}) == Spelling(
        has_byte_tokens=True, replacements=marks, num_dropped_spaces=1
    )
    never = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never"}
    assert spelling_of(never) == Spelling(replacements=marks)


@pytest.fixture(scope="module")
def default_tokenizer(default_model_dir: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(default_model_dir)))


def test_txt_15_every_token_of_the_default_model_has_the_bytes_that_decoding_shows(
    default_tokenizer: Tokenizer,
) -> None:
    for token_id in range(default_tokenizer.vocab_size):
        shown = default_tokenizer.token_bytes(token_id).decode("utf-8", "replace")
        assert shown == default_tokenizer.decode([token_id], skip_special_tokens=False)
