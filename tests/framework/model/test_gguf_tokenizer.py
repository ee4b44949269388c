"""Tokenizers rebuilt from GGUF metadata against the tokenizers that they were written of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from gguf_files import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, TinyVocabulary
from gguf_tokenizers import (
    ODD_TEXTS,
    ORIGINALS,
    SENTENCES,
    byte_level_metadata,
    gguf_merges,
    isolated,
    load_vocabulary,
    sentencepiece_metadata,
    trained_byte_level,
    trained_sentencepiece,
    write_vocabulary,
)
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import pre_tokenizers
from tokenyard.errors import ModelLoadError
from tokenyard.model.gguf_pretokenizers import PRE_TOKENIZERS
from tokenyard.model.tokenizer import Tokenizer

Write = Callable[[TinyVocabulary], Path]


@pytest.mark.parametrize("pre", ORIGINALS)
def test_mod_04_ids_are_those_of_the_original_on_odd_texts(write_here: Write, pre: str) -> None:
    original = trained_byte_level(pre)
    made = load_vocabulary(write_here(byte_level_metadata(original, pre)))
    for text in ODD_TEXTS + SENTENCES:
        ids = original.encode(text, add_special_tokens=False).ids
        assert made.encode(text) == ids, text
        assert made.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        assert made.decode(ids) == original.decode(ids)


@pytest.mark.parametrize("with_merges", [False, True])
def test_mod_04_sentencepiece_ids_are_those_of_the_original_on_odd_texts(write_here: Write, with_merges: bool) -> None:
    original = trained_sentencepiece()
    vocabulary = sentencepiece_metadata(original)
    if with_merges:
        vocabulary.merges = [" ".join(pair) for pair in gguf_merges(original)]
    made = load_vocabulary(write_here(vocabulary))
    fallbacks = 0
    for text in ODD_TEXTS + SENTENCES:
        ids = original.encode(text, add_special_tokens=False).ids
        assert made.encode(text) == ids, text
        assert made.decode(ids, skip_special_tokens=False) == original.decode(ids, skip_special_tokens=False)
        fallbacks += sum(3 <= index < 259 for index in ids)
    assert fallbacks > 100


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40))
@pytest.mark.parametrize("pre", ["smollm", "llama-bpe", "qwen2", "tekken", "sentencepiece"])
def test_mod_04_any_text_has_the_ids_of_the_original_and_comes_back(
    tokenizer_pairs: dict[str, tuple[tokenizers.Tokenizer, Tokenizer]], pre: str, text: str
) -> None:
    original, made = tokenizer_pairs[pre]
    ids = made.encode(text)
    assert ids == original.encode(text, add_special_tokens=False).ids
    if pre not in ("qwen2", "sentencepiece"):  # one composes characters, the other has one spelling for ▁ and spaces
        assert made.decode(ids, skip_special_tokens=False) == text


@pytest.fixture(scope="module")
def tokenizer_pairs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[tokenizers.Tokenizer, Tokenizer]]:
    pairs = {}
    for pre in ("smollm", "llama-bpe", "qwen2", "tekken", "sentencepiece"):
        original = trained_sentencepiece() if pre == "sentencepiece" else trained_byte_level(pre)
        vocabulary = sentencepiece_metadata(original) if pre == "sentencepiece" else byte_level_metadata(original, pre)
        path = write_vocabulary(tmp_path_factory.mktemp("pairs") / "vocabulary.gguf", vocabulary)
        pairs[pre] = original, load_vocabulary(path)
    return pairs


def converted_sentencepiece(original: Any) -> TinyVocabulary:
    """What a converter writes of a processor of the package sentencepiece, which has no types."""
    ids = range(original.get_piece_size())
    questions = ((original.is_unknown, UNKNOWN), (original.is_control, CONTROL), (original.is_byte, BYTE))
    kinds = [next((kind for is_it, kind in questions if is_it(index)), NORMAL) for index in ids]
    kinds[original.piece_to_id("<think>")] = USER_DEFINED
    return TinyVocabulary(
        model="llama",
        pre="default",
        tokens=[original.id_to_piece(index) for index in ids],
        types=kinds,
        scores=[original.get_score(index) for index in ids],
        ids={"unknown": original.unk_id(), "bos": original.bos_id(), "eos": original.eos_id()},
        flags={"add_bos_token": False},
    )


def test_mod_04_ids_are_those_of_sentencepiece_itself(write_here: Write, tmp_path: Path) -> None:
    """A model trained and run by the package sentencepiece, written as converters write one."""
    sentencepiece = pytest.importorskip("sentencepiece")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(SENTENCES).split("\n")),
        model_prefix=str(tmp_path / "spm"),
        vocab_size=700,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=0.98,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        user_defined_symbols=["<think>"],
        minloglevel=2,
    )
    original = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "spm.model"))
    vocabulary = converted_sentencepiece(original)
    made = load_vocabulary(write_here(vocabulary))
    markers = ("<think>", "<s>", "<0x")  # whole in the text for us, and followed by a space of its own, as in llama.cpp
    for text in ODD_TEXTS + SENTENCES:
        if not any(marker in text for marker in markers):
            assert made.encode(text) == original.encode(text), text
            assert made.decode(made.encode(text)) == original.decode(original.encode(text)), text


def test_scores_that_say_nothing_leave_the_order_of_ids(write_here: Write) -> None:
    """Some converters write one score for all tokens; ids are in the order in which BPE learnt them."""
    original = trained_sentencepiece()
    vocabulary = sentencepiece_metadata(original)
    made = load_vocabulary(write_here(replace(vocabulary, scores=[-1000.0] * len(vocabulary.tokens))))
    for text in ODD_TEXTS + SENTENCES:
        assert made.encode(text) == original.encode(text, add_special_tokens=False).ids


def test_control_and_unused_tokens_are_never_made_of_text(write_here: Write) -> None:
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "<", "s", ">", "s>", "▁", "<s", "ss"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * 6, UNUSED]
    vocabulary = TinyVocabulary(
        model="llama", pre=None, tokens=tokens, types=types, scores=[0.0] * len(tokens), flags={"add_bos_token": False}
    )
    made = load_vocabulary(write_here(vocabulary))
    spelled = [made.id_to_token(index) for index in made.encode("<s>ss", parse_special=False)]
    assert spelled == ["▁", "<s", ">", "s", "s"] or spelled == ["▁", "<", "s>", "s", "s"]
    assert [made.id_to_token(index) for index in made.encode("<s>")] == ["<s>"]


@pytest.mark.parametrize("prefix", [False, True])
def test_mod_04_add_space_prefix_is_obeyed(write_here: Write, prefix: bool) -> None:
    vocabulary = sentencepiece_metadata(trained_sentencepiece())
    vocabulary.flags["add_space_prefix"] = prefix
    made = load_vocabulary(write_here(vocabulary))
    first = made.id_to_token(made.encode("the")[0])
    assert first is not None
    assert first.startswith("▁") is prefix
    assert made.decode(made.encode("the fox")) == "the fox"
    assert made.decode(made.encode(" the")) == " the"


def test_mod_04_add_space_prefix_is_obeyed_by_byte_level_vocabularies(write_here: Write) -> None:
    vocabulary = byte_level_metadata(trained_byte_level("gpt-2"), "gpt-2")
    vocabulary.flags["add_space_prefix"] = True
    made = load_vocabulary(write_here(vocabulary))
    assert made.encode("the") == made.encode(" the")


@pytest.mark.parametrize(
    ("flags", "before", "after"),
    [
        ({}, [], []),
        ({"add_bos_token": True}, [1], []),
        ({"add_eos_token": True}, [], [0]),
        ({"add_bos_token": True, "add_eos_token": True}, [1], [0]),
        ({"add_bos_token": False, "add_eos_token": False}, [], []),
    ],
)
def test_mod_04_bos_and_eos_are_added_as_the_file_says(
    write_here: Write, flags: dict[str, bool], before: list[int], after: list[int]
) -> None:
    vocabulary = byte_level_metadata(trained_byte_level("smollm"), "smollm")
    made = load_vocabulary(write_here(replace(vocabulary, flags=flags)))
    plain = made.encode("hi there", add_special_tokens=False)
    assert made.encode("hi there") == [*before, *plain, *after]


@pytest.mark.parametrize(("pre", "adds"), [("llama-bpe", True), ("tekken", True), ("qwen2", False), ("gpt-2", False)])
def test_where_the_file_does_not_say_the_pre_tokenizer_does(write_here: Write, pre: str, adds: bool) -> None:
    vocabulary = replace(byte_level_metadata(trained_byte_level("gpt-2"), pre), flags={})
    assert load_vocabulary(write_here(vocabulary)).encode("") == ([1] if adds else [])
    spm = replace(sentencepiece_metadata(trained_sentencepiece()), flags={}, ids={})
    assert load_vocabulary(write_here(spm)).encode("") == [1]


def test_ends_are_ids_whatever_their_tokens_are_called(write_here: Write) -> None:
    """`$A` and `x:1` would mean something else to a template of the library."""
    for name in ("$A", "x:1", "$B:0", "bos", "eos"):
        vocabulary = byte_level_metadata(trained_byte_level("gpt-2"), "gpt-2")
        vocabulary.tokens[1], vocabulary.flags = name, {"add_bos_token": True, "add_eos_token": True}
        assert load_vocabulary(write_here(vocabulary)).encode("hi")[0] == 1


def test_the_default_pre_tokenizer_cuts_as_llama_cpp_does() -> None:
    """Punctuation first, then GPT-2's words, then digits by three."""
    splits = pre_tokenizers.Sequence([isolated(split) for split in PRE_TOKENIZERS["default"].splits])
    pieces = [piece for piece, _ in splits.pre_tokenize_str("Hello, world! don't 1234567 a<=b ² x  y")]
    assert pieces == [
        "Hello", ",", " world", "!", " don", "'", "t", " ", "123", "456", "7", " a", "<=", "b", " ", "²", " x", " ",
        " y",
    ]  # fmt: skip


@pytest.mark.parametrize("pre", ["unheard-of", "gpt-4o", "chatglm-bpe", "Qwen2", None])
def test_unknown_pre_tokenizers_are_refused_by_name(write_here: Write, pre: str | None) -> None:
    vocabulary = replace(byte_level_metadata(trained_byte_level("gpt-2"), "gpt-2"), pre=pre)
    with pytest.raises(ModelLoadError, match=r"pre-tokenizer.*allowed: .*qwen2") as caught:
        load_vocabulary(write_here(vocabulary))
    assert pre is None or repr(pre) in str(caught.value)
