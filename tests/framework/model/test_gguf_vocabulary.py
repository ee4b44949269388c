"""Vocabularies in GGUF metadata that do not hold: one clear error each (C2)."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
from gguf_files import BYTE, CONTROL, UNKNOWN, TinyVocabulary
from gguf_tokenizers import (
    byte_level_metadata,
    load_vocabulary,
    sentencepiece_metadata,
    trained_byte_level,
    trained_sentencepiece,
)
from tokenyard.errors import ModelLoadError

Write = Callable[[TinyVocabulary], Path]


BROKEN: dict[str, tuple[Callable[[TinyVocabulary], TinyVocabulary], str]] = {
    "a token twice": (lambda v: replace(v, tokens=[*v.tokens[:-1], v.tokens[5]]), "twice"),
    "no tokens": (lambda v: replace(v, tokens=[], types=[]), "tokens"),
    "an endless token": (lambda v: replace(v, tokens=[*v.tokens[:-1], "x" * 2000]), "2000 characters"),
    "too few types": (lambda v: replace(v, types=v.types[:-1]), "token_type.*one entry"),
    "too many types": (lambda v: replace(v, types=[*v.types, 1]), "token_type.*one entry"),
    "a type of none": (lambda v: replace(v, types=[99, *v.types[1:]]), "token_type.*from 0 to 6"),
    "too few scores": (lambda v: replace(v, scores=[0.0]), "scores.*one entry"),
    "a score of nan": (lambda v: replace(v, scores=[float("nan")] * len(v.tokens)), "finite"),
    "bos beyond": (lambda v: replace(v, ids={**v.ids, "bos": len(v.tokens)}), "bos_token_id.*below"),
    "eos far beyond": (lambda v: replace(v, ids={**v.ids, "eos": 2**32 - 1}), "eos_token_id.*below"),
    "a fim token beyond": (lambda v: replace(v, ids={**v.ids, "fim_pre": 10**6}), "fim_pre_token_id.*below"),
    "a merge of unknown tokens": (lambda v: replace(v, merges=["qq zz"]), "merges.*'qq zz'"),
    "a merge into no token": (lambda v: replace(v, merges=["x q"]), "merges"),
    "a merge of one": (lambda v: replace(v, merges=["th"]), "merges"),
    "an empty merge": (lambda v: replace(v, merges=[""]), "merges"),
}
SENTENCEPIECE_BROKEN: dict[str, tuple[Callable[[TinyVocabulary], TinyVocabulary], str]] = {
    "a byte that is none": (lambda v: replace(v, tokens=[*v.tokens[:3], "<0xZZ>", *v.tokens[4:]]), "<0xZZ>"),
    "a byte too large": (lambda v: replace(v, tokens=[*v.tokens[:3], "<0x1FF>", *v.tokens[4:]]), "<0x1FF>"),
    "a byte of a word": (lambda v: replace(v, types=[*v.types[:-1], BYTE]), "is a byte"),
    "another pre-tokenizer": (lambda v: replace(v, pre="llama-bpe"), "llama-bpe"),
    "another model": (lambda v: replace(v, model="bert"), "'bert'.*gpt2, llama"),
    "whitespace removed": (lambda v: replace(v, flags={"remove_extra_whitespaces": True}), "extra whitespace"),
}


@pytest.mark.parametrize("name", BROKEN)
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_c2_a_vocabulary_that_does_not_hold_is_one_clear_error(write_here: Write, model: str, name: str) -> None:
    break_it, words = BROKEN[name]
    vocabulary = (
        byte_level_metadata(trained_byte_level("gpt-2"), "gpt-2")
        if model == "gpt2"
        else sentencepiece_metadata(trained_sentencepiece())
    )
    path = write_here(break_it(vocabulary))
    with pytest.raises(ModelLoadError, match=words) as caught:
        load_vocabulary(path)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400 + len(str(path))


@pytest.mark.parametrize("name", SENTENCEPIECE_BROKEN)
def test_c2_a_sentencepiece_vocabulary_that_does_not_hold_is_one_clear_error(write_here: Write, name: str) -> None:
    break_it, words = SENTENCEPIECE_BROKEN[name]
    with pytest.raises(ModelLoadError, match=words):
        load_vocabulary(write_here(break_it(sentencepiece_metadata(trained_sentencepiece()))))


def test_c2_a_token_that_is_not_utf_8_is_refused(write_here: Write) -> None:
    path = write_here(byte_level_metadata(trained_byte_level("gpt-2"), "gpt-2"))
    path.write_bytes(path.read_bytes().replace(b"<think>", b"<th\xffnk>"))
    with pytest.raises(ModelLoadError, match="not UTF-8"):
        load_vocabulary(path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("tokenizer.ggml.add_bos_token", 1),
        ("tokenizer.ggml.tokens", "text"),
        ("tokenizer.chat_template", 3),
        ("tokenizer.ggml.bos_token_id", -1),
        ("tokenizer.ggml.bos_token_id", "x"),
        ("tokenizer.ggml.model", 5),
    ],
)
def test_c2_a_key_of_a_wrong_type_is_named(tmp_path: Path, key: str, value: int | str) -> None:
    vocabulary = byte_level_metadata(trained_byte_level("gpt-2"), "gpt-2")
    writer = gguf.GGUFWriter(tmp_path / "wrong.gguf", "llama")
    vocabulary.flags.pop("add_bos_token")
    vocabulary.write(writer)
    del writer.kv_data[0]["tokenizer.ggml.tokens" if key == "tokenizer.ggml.tokens" else "tokenizer.ggml.model"]
    if key != "tokenizer.ggml.model":
        writer.add_tokenizer_model("gpt2")
    writer.kv_data[0].pop(key, None)
    (writer.add_string if isinstance(value, str) else writer.add_int32)(key, value)  # type: ignore[arg-type]
    if key != "tokenizer.ggml.tokens" and "tokenizer.ggml.tokens" not in writer.kv_data[0]:
        writer.add_token_list(vocabulary.tokens)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ModelLoadError, match=key):
        load_vocabulary(tmp_path / "wrong.gguf")


def test_c1_a_small_file_cannot_imply_a_large_table_of_merges(write_here: Write) -> None:
    """All runs of one letter: a cut at every place of each makes two tokens, half a million merges of long strings."""
    runs = ["a" * length for length in range(1, 1025)]
    vocabulary = TinyVocabulary(
        model="llama", tokens=["<unk>", "<s>", "</s>", *runs], pre=None, types=[UNKNOWN, CONTROL, CONTROL, *[1] * 1024]
    )
    path = write_here(vocabulary)
    tracemalloc.start()
    try:
        with pytest.raises(ModelLoadError, match="implies more than"):
            load_vocabulary(path)
        assert tracemalloc.get_traced_memory()[1] < 64 * 2**20
    finally:
        tracemalloc.stop()
