"""Folders without a tokenizer.json: SentencePiece models, and vocabularies with merges."""

from __future__ import annotations

import importlib.util
import json
import random
import socket
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
from chats import refusal, user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece_models import GEMMA_TRAINING, train, write_folder
from tokenyard.errors import ModelLoadError
from tokenyard.model.files import ModelFiles, resolve_model
from tokenyard.model.tokenizer import Tokenizer, load_tokenizer
from tokenyard.model.tokenizer_conversion import convert_tokenizer

MakeLlama = Callable[..., Path]

TEXTS = [
    *("", " ", "  ", "hi", " hi", "hi ", "  hi  the", "hi\nthe\n\n", "\n", "\t", "a  b   c", "\r\n", " \n hi", "\x00"),
    *("你好😀", "e\u0301 é", "a\u0301", "👨‍👩‍👧", "\u200b", "\ufeffx", "ﬁ \uff21", "12345", "the" * 5, "▁hi", "hi▁"),
    *("<s>", "hi<s>the", "hi </s> the", "<s> hi", "<unk>x", "[INST] hi [/INST]", "<new> x <new>", "<0x41>"),
    *("<bos>hi<eos>", "<start_of_turn>user\nhi<end_of_turn>\n", "<pad><mask>"),
]
NAMES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
LLAMA = {"tokenizer_class": "LlamaTokenizer", **NAMES}
GEMMA = {
    "tokenizer_class": "GemmaTokenizer",
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "pad_token": "<pad>",
    "unk_token": "<unk>",
    "add_bos_token": True,
    "additional_special_tokens": ["<start_of_turn>", "<end_of_turn>"],
}
MISTRAL = {**LLAMA, "legacy": False, "add_bos_token": True, "add_eos_token": False}


def llama_style(**settings: object) -> dict[str, object]:
    return {"tokenizer_config": {**LLAMA, **settings}, "config": {"model_type": "llama"}}


CASES: dict[str, dict[str, object]] = {
    "nothing but the model": {"config": {"model_type": "llama"}},
    "plain": llama_style(),
    "unknown model type": {"tokenizer_config": NAMES, "config": {"model_type": "phi3"}},
    "mistral": {"tokenizer_config": MISTRAL, "config": {"model_type": "mistral"}},
    "added tokens": {**llama_style(), "added_tokens": {"<new>": 400}},
    "tokens to be added": llama_style(additional_special_tokens=["[INST]", "[/INST]"]),
    "special tokens map": {**llama_style(), "special_tokens_map": {"bos_token": {"content": "<s>"}}},
    **{
        f"legacy={legacy} prefix={prefix} ends={ends}": llama_style(
            legacy=legacy,
            **({} if prefix is None else {"add_prefix_space": prefix}),
            **({} if ends is None else {"add_bos_token": ends, "add_eos_token": ends}),
        )
        for legacy in (True, False)
        for prefix in (None, True, False)
        for ends in (None, True, False)
    },
}


def load(folder: Path) -> Tokenizer:
    return load_tokenizer(ModelFiles(name="m", path=folder, format="safetensors", config={}, generation_config={}))


def assert_as_transformers(folder: Path) -> Tokenizer:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    ours = load(folder)
    generator = random.Random(1)
    mixed = ["".join(generator.choices(TEXTS, k=4)) for _ in range(60)]
    for text in (*TEXTS, *mixed):
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == reference.encode(text, add_special_tokens=special), text
            assert ours.decode(ids, skip_special_tokens=False) == reference.decode(ids), text
            assert ours.decode(ids) == reference.decode(ids, skip_special_tokens=True), text
    assert ours.vocab_size >= max(reference.get_vocab().values())
    return ours


@pytest.fixture(scope="module")
def llama_model() -> bytes:
    return train()


@pytest.mark.parametrize("case", CASES)
def test_a_model_alone_encodes_as_in_transformers(tmp_path: Path, llama_model: bytes, case: str) -> None:
    assert_as_transformers(write_folder(tmp_path, llama_model, **CASES[case]))


def test_gemmas_style_encodes_as_in_transformers(tmp_path: Path) -> None:
    folder = write_folder(tmp_path, train(**GEMMA_TRAINING), tokenizer_config=GEMMA, config={"model_type": "gemma2"})
    assert assert_as_transformers(folder).encode("hi")[0] == 2


@pytest.mark.parametrize("name", ["tokenizer.model", "spiece.model"])
def test_unigram_models_encode_as_in_transformers(tmp_path: Path, name: str) -> None:
    settings: dict[str, object] = {"tokenizer_config": {"tokenizer_class": "T5Tokenizer"}}
    settings["config"] = {"model_type": "t5"}
    assert_as_transformers(write_folder(tmp_path, train(model_type="unigram"), name, **settings))


def test_the_names_of_control_tokens_come_from_the_conversion_too(tmp_path: Path, llama_model: bytes) -> None:
    folder = write_folder(tmp_path, llama_model, config={"model_type": "llama"})
    template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
    ids = load(folder).encode_chat(user("a</s>"), chat_template=template)
    assert (ids[0], ids[-1]) == (1, 2)
    assert not {1, 2} & set(ids[1:-1])


def test_b2_code_that_came_with_the_model_is_refused(tmp_path: Path, llama_model: bytes) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    mapped = {**LLAMA, "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    with pytest.raises(ModelLoadError, match="auto_map"):
        load(write_folder(tmp_path, llama_model, tokenizer_config=mapped))


def test_b9_files_outside_the_folder_are_not_read_whatever_the_settings_say(tmp_path: Path, llama_model: bytes) -> None:
    elsewhere = write_folder(tmp_path / "elsewhere", train(vocab_size=320)) / "tokenizer.model"
    named = {key: str(elsewhere) for key in ("vocab_file", "tokenizer_file", "merges_file", "name_or_path")}
    plain = write_folder(tmp_path / "plain", llama_model, **llama_style())
    folder = write_folder(tmp_path / "m", llama_model, **llama_style(**named))
    assert load(folder).encode("hello the world") == load(plain).encode("hello the world")


def test_no_connection_is_made(tmp_path: Path, llama_model: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise RuntimeError("a connection")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    load(write_folder(tmp_path, llama_model, **llama_style()))


@pytest.mark.parametrize("package", ["sentencepiece", "protobuf"])
def test_a_package_that_is_not_installed_is_named(
    tmp_path: Path, llama_model: bytes, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    module = {"sentencepiece": "sentencepiece", "protobuf": "google.protobuf"}[package]
    find = importlib.util.find_spec

    def without(name: str, *others: Any) -> ModuleSpec | None:
        return None if name == module else find(name, *others)

    monkeypatch.setattr("tokenyard.model.tokenizer_conversion.find_spec", without)
    with pytest.raises(ModelLoadError, match=f"pip install {package}"):
        load(write_folder(tmp_path, llama_model, **llama_style()))


def refused(folder: Path, content: bytes) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(write_folder(folder, content, **llama_style()))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_c2_a_model_that_is_none_is_refused(tmp_path: Path, llama_model: bytes) -> None:
    for content in (b"", b"not a model", b"\xff" * 1000, llama_model[:-7], b"IGhlbGxv 0\n" * 100):
        assert "tokenizer.model" in refused(tmp_path, content)


def changed(model: bytes, change: Callable[[Any], None]) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    proto = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined,unused-ignore]
    proto.ParseFromString(model)
    change(proto)
    serialized: bytes = proto.SerializeToString()
    return serialized


def test_c2_pieces_that_contradict_each_other_are_refused(tmp_path: Path, llama_model: bytes) -> None:
    def twice(proto: Any) -> None:
        proto.pieces[300].piece = proto.pieces[301].piece

    def unknown_unknown(proto: Any) -> None:
        proto.trainer_spec.unk_id = 9999

    def no_pieces(proto: Any) -> None:
        del proto.pieces[:]

    assert "twice" in refused(tmp_path, changed(llama_model, twice))
    assert "9999" in refused(tmp_path, changed(llama_model, unknown_unknown))
    assert "0 pieces" in refused(tmp_path, changed(llama_model, no_pieces))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_c2_any_damage_to_a_model_is_a_clean_error_or_a_sound_tokenizer(
    tmp_path: Path, llama_model: bytes, data: st.DataObject
) -> None:
    content = bytearray(llama_model)
    for _ in range(data.draw(st.integers(1, 4))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 6))] = data.draw(st.binary(max_size=6))
    try:
        tokenizer = load(write_folder(tmp_path, bytes(content), **llama_style()))
    except ModelLoadError:
        return
    assert all(0 <= index < tokenizer.vocab_size for index in tokenizer.encode("hello 你好 the world"))


def test_c2_a_model_of_absurd_size_is_not_read(tmp_path: Path, llama_model: bytes) -> None:
    write_folder(tmp_path, llama_model)
    with (tmp_path / "tokenizer.model").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelLoadError, match="no tokenizer needs"):
        load(tmp_path)


def test_without_tokenizer_json_transformers_converts_what_is_there(make_llama: MakeLlama) -> None:
    folder = make_llama()
    before = load_tokenizer(resolve_model(str(folder))).encode("hi the")
    model = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("\n".join(" ".join(pair) for pair in model["merges"]))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    assert load_tokenizer(resolve_model(str(folder))).encode("hi the") == before


def test_without_any_tokenizer_the_folder_is_refused(make_llama: MakeLlama) -> None:
    folder = make_llama()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(resolve_model(str(folder)))
    with pytest.raises(ModelLoadError, match=r"tokenizer\.model"):
        convert_tokenizer(folder)


def test_a_text_that_is_not_unicode_is_refused_in_a_chat_too(tmp_path: Path, llama_model: bytes) -> None:
    tokenizer = load(write_folder(tmp_path, llama_model, **llama_style()))
    error = refusal(tokenizer.encode_chat, user("\ud800"), chat_template="{{ messages[0].content }}")
    assert "UTF-8" in str(error)
