"""tokenizer.json and tokenizer_config.json: what holds of a vocabulary, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from chats import MakeTokenizer, user
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, models, processors
from tokenyard.errors import ModelLoadError, TokenyardError, ValidationError
from tokenyard.model.files import resolve_model
from tokenyard.model.tokenizer import Tokenizer, load_tokenizer
from tokenyard.model.tokenizer_file import MAX_TOKENS, read_tokenizer_file

MakeLlama = Callable[..., Path]
Content = dict[str, Any]

BPE: Content = {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": [["a", "b"]]}
UNIGRAM: Content = {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["a", -1.0], ["b", -2.0]]}
CONTROL: Content = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}


def file_content(model: Content, **others: object) -> Content:
    return {"version": "1.0", "added_tokens": [{"id": 3, "content": "<s>", **CONTROL}], "model": model, **others}


def read(folder: Path, content: Content | str | bytes) -> Tokenizer:
    path = folder / "tokenizer.json"
    if isinstance(content, dict):
        content = json.dumps(content)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return Tokenizer(read_tokenizer_file(path), {}, None, origin=str(path))


def refused(folder: Path, content: Content | str | bytes) -> str:
    with pytest.raises(ModelLoadError) as caught:
        read(folder, content)
    assert "\n" not in str(caught.value)
    assert "tokenizer.json" in str(caught.value)
    return str(caught.value)


def test_the_plain_files_that_the_bad_ones_are_made_of_are_read(tmp_path: Path) -> None:
    assert read(tmp_path, file_content(BPE)).encode("ab<s>b") == [2, 3, 1]
    assert read(tmp_path, file_content(UNIGRAM)).encode("ab<s>q") == [1, 2, 3, 0]


BAD_IDS: list[dict[str, object]] = [
    {"a": -1, "b": 1, "ab": 2},
    {"a": 2**40, "b": 1, "ab": 2},
    {"a": 2**32 - 1, "b": 1, "ab": 2},
    {"a": MAX_TOKENS, "b": 1, "ab": 2},
    {"a": 1, "b": 1, "ab": 2},
    {"a": 3, "b": 1, "ab": 2},
    {"a": "0", "b": 1, "ab": 2},
    {"a": 0.5, "b": 1, "ab": 2},
    {"a": None, "b": 1, "ab": 2},
    {"a": True, "b": 1, "ab": 2},
    {"a": [0], "b": 1, "ab": 2},
    {},
]


@pytest.mark.parametrize("vocabulary", BAD_IDS, ids=str)
def test_c2_ids_that_cannot_be_are_refused(tmp_path: Path, vocabulary: dict[str, object]) -> None:
    refused(tmp_path, file_content({**BPE, "vocab": vocabulary}))


@pytest.mark.parametrize("vocabulary", [None, [], ["a", "b"], "ab", 3, [["a", 0]], {"a": {"b": 1}}], ids=str)
def test_c2_vocabularies_of_another_type_are_refused(tmp_path: Path, vocabulary: object) -> None:
    refused(tmp_path, file_content({**BPE, "vocab": vocabulary}))


def test_c2_a_token_listed_twice_is_refused_in_each_kind_of_vocabulary(tmp_path: Path) -> None:
    content = json.dumps(file_content({**BPE, "merges": []})).replace('"b": 1', '"a": 1')
    assert "'a' is in the vocabulary twice" in refused(tmp_path, content)
    assert "'a'" in refused(tmp_path, file_content({**UNIGRAM, "vocab": [["<unk>", 0], ["a", -1], ["a", -2]]}))


def test_c2_holes_between_ids_are_ids_without_text(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, file_content({**BPE, "vocab": {"a": 0, "b": 1, "ab": 900}}))
    assert tokenizer.vocab_size == 901
    assert tokenizer.encode("ab") == [900]
    assert [tokenizer.id_to_token(index) for index in (2, 899, 900, 901, 2**70)] == [None, None, "ab", None, None]
    assert tokenizer.decode([0, 500, 10**6, 2**70]) == "a"


@pytest.mark.parametrize(
    "added",
    [
        [{"id": 99, "content": "<s>", **CONTROL}],
        [{"id": 3, "content": "<s>", **CONTROL}, {"id": 3, "content": "<q>", **CONTROL}],
        [{"id": 0, "content": "<s>", **CONTROL}],
        [{"id": -3, "content": "<s>", **CONTROL}],
        [{"id": 2**40, "content": "<s>", **CONTROL}],
        [{"id": "3", "content": "<s>", **CONTROL}],
        [{"id": 3, "content": 5, **CONTROL}],
        [{"id": 3, **CONTROL}],
        [3],
        {"<s>": 3},
    ],
    ids=str,
)
def test_c2_added_tokens_that_are_not_where_they_say_are_refused(tmp_path: Path, added: object) -> None:
    refused(tmp_path, file_content(BPE, added_tokens=added))


@pytest.mark.parametrize(
    "model",
    [
        {**BPE, "merges": [["a", "c"]]},
        {**BPE, "merges": ["a  b"]},
        {**BPE, "dropout": 5.0},
        {**BPE, "type": "Surprise"},
        {**BPE, "type": "Unigram"},
        {**UNIGRAM, "unk_id": 9},
        {**UNIGRAM, "unk_id": -1},
        {**UNIGRAM, "vocab": []},
        {**UNIGRAM, "vocab": [["<unk>", "x"]]},
        {},
        None,
        3,
    ],
    ids=str,
)
def test_c2_models_that_contradict_themselves_are_refused(tmp_path: Path, model: object) -> None:
    refused(tmp_path, {**file_content(BPE), "model": model})


def test_c2_a_frame_of_tokens_that_are_not_there_is_refused(tmp_path: Path) -> None:
    frame = {"type": "TemplateProcessing", "pair": [{"Sequence": {"id": "A", "type_id": 0}}]}
    single = [{"SpecialToken": {"id": "<q>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    for ids in ([4_000_000_000], [77]):
        known = {"<q>": {"id": "<q>", "ids": ids, "tokens": ["<q>"]}}
        refused(tmp_path, file_content(BPE, post_processor={**frame, "single": single, "special_tokens": known}))
    refused(tmp_path, file_content(BPE, post_processor={**frame, "single": single, "special_tokens": {}}))  # a panic


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"not json", b'{"model": {"type": "BPE"}}', b"\xff\xfe{}"])
def test_c2_what_is_no_tokenizer_is_refused(tmp_path: Path, content: bytes) -> None:
    refused(tmp_path, content)


def test_c2_a_vocabulary_that_is_not_utf_8_is_refused(tmp_path: Path) -> None:
    content = json.dumps(file_content(BPE)).encode()
    refused(tmp_path, content.replace(b'"b": 1', b'"\xff": 1'))
    refused(tmp_path, content.replace(b'"b": 1', b'"\\ud800": 1'))


def test_c2_a_file_of_absurd_size_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "tokenizer.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(ModelLoadError, match="no tokenizer needs"):
        read_tokenizer_file(tmp_path / "tokenizer.json")


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_c2_any_damage_to_a_tokenizer_is_a_clean_error_or_a_sound_tokenizer(
    tmp_path: Path, data: st.DataObject
) -> None:
    base = data.draw(st.sampled_from([file_content(BPE), file_content(UNIGRAM)]))
    content = bytearray(json.dumps(base).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        place = data.draw(st.integers(0, len(content) - 1))
        content[place : place + data.draw(st.integers(0, 8))] = data.draw(
            st.binary(max_size=4) | st.sampled_from([b"-1", b"4294967295", b'"', b"null", b"{}", b"[]", b"<s>"])
        )
    try:
        tokenizer = read(tmp_path, bytes(content))
        ids = tokenizer.encode("ab<s>q ü")
    except TokenyardError:
        return
    assert all(0 <= index < tokenizer.vocab_size <= MAX_TOKENS for index in ids)
    tokenizer.decode(ids)


def test_smp_17_the_vocabularys_size_counts_added_tokens_and_holes(tmp_path: Path) -> None:
    assert read(tmp_path, file_content(BPE)).vocab_size == 4
    far = file_content({**BPE, "vocab": {"a": 0, "b": 1, "ab": 2, "z": 6}})
    far["added_tokens"] = [{"id": 6, "content": "z", **CONTROL}]
    assert read(tmp_path, far).vocab_size == 7


def test_a_text_that_the_model_of_the_tokenizer_cannot_spell_is_one_error_of_the_request(tmp_path: Path) -> None:
    tokenizer = read(tmp_path, file_content({**UNIGRAM, "unk_id": None}))
    assert tokenizer.encode("ab") == [1, 2]
    with pytest.raises(ValidationError, match="cannot encode"):
        tokenizer.encode("q")


def test_settings_of_a_training_run_in_the_file_do_not_cut_or_pad(make_llama: MakeLlama) -> None:
    folder = make_llama()
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(resolve_model(str(folder))).encode("abcdefgh")) == 8


def framed(**config: object) -> list[int]:
    """What stands around a text when the file itself adds both ends."""
    backend = tokenizers.Tokenizer(models.BPE({"x": 0, "<s>": 1, "</s>": 2}, []))
    backend.add_special_tokens([AddedToken("<s>", normalized=False), AddedToken("</s>", normalized=False)])
    backend.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>", **config}, None).encode("x")


def test_the_configs_flags_rule_over_the_file_and_an_end_without_one_stays() -> None:
    assert framed() == framed(add_bos_token=True) == framed(add_eos_token=True) == [1, 0, 2]
    assert framed(add_bos_token=False) == [0, 2]
    assert framed(add_eos_token=False) == [1, 0]
    assert framed(add_bos_token=False, add_eos_token=False) == [0]
    assert framed(add_bos_token=True, add_eos_token=False) == [1, 0]


@pytest.mark.parametrize("flag", [True, False])
def test_the_configs_flag_adds_a_bos_that_the_file_does_not(with_template: MakeTokenizer, flag: bool) -> None:
    assert with_template(None, add_bos_token=flag).encode("")[:1] == ([1] if flag else [])


def test_tokens_that_only_the_config_has_are_added(with_template: MakeTokenizer) -> None:
    spec = {"content": "<|call|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = with_template(None, added_tokens_decoder={"265": spec})
    assert tokenizer.encode("<|call|>") == [265]
    assert tokenizer.decode([265]) == ""
    assert tokenizer.vocab_size == 266
    with pytest.raises(ModelLoadError, match="999"):
        with_template(None, added_tokens_decoder={"999": spec})


def test_tokens_of_an_added_tokens_file_are_added(make_llama: MakeLlama) -> None:
    folder = make_llama()
    (folder / "added_tokens.json").write_text(json.dumps({"<|call|>": 265, "<think>": 264}))
    tokenizer = load_tokenizer(resolve_model(str(folder)))
    assert tokenizer.encode("hi<|call|>")[-1] == 265
    assert tokenizer.encode("<think>") == [264]
    for bad, words in (({"<|call|>": 300}, "300"), ({"\ud800": 265}, "added_tokens")):
        (folder / "added_tokens.json").write_text(json.dumps(bad))
        with pytest.raises(ModelLoadError, match=words):
            load_tokenizer(resolve_model(str(folder)))


def test_the_configs_flags_of_an_added_token_count(with_template: MakeTokenizer) -> None:
    spec = {"content": "<|im_end|>", "special": True, "lstrip": True, "rstrip": False, "normalized": False}
    assert with_template(None).encode("a <|im_end|>") != with_template(None, added_tokens_decoder={"2": spec}).encode(
        "a <|im_end|>"
    )


@pytest.mark.parametrize("key", ["additional_special_tokens", "extra_special_tokens"])
def test_tokens_that_the_config_calls_special_are_control_tokens(with_template: MakeTokenizer, key: str) -> None:
    for value in (["<think>"], [{"content": "<think>"}], {"thought_token": "<think>"}):
        tokenizer = with_template(None, **{key: value})
        think = tokenizer.token_to_id("<think>")
        assert think in tokenizer.special_ids
        assert tokenizer.encode("<think>") == [think]


@pytest.mark.parametrize(
    "config",
    [
        {"bos_token": "\ud800"},
        {"additional_special_tokens": ["\ud800"]},
        {"added_tokens_decoder": {"265": {"content": "\ud800"}}},
        {"added_tokens_decoder": {"99999999": {"content": "x<y"}}},
    ],
    ids=ascii,
)
def test_c2_settings_that_cannot_be_text_are_refused(with_template: MakeTokenizer, config: Content) -> None:
    with pytest.raises(ModelLoadError):
        with_template(None, **config)


def test_c2_settings_of_odd_types_mean_nothing(with_template: MakeTokenizer) -> None:
    odd = {
        "bos_token": 3,
        "added_tokens_decoder": {"²": {"content": "x"}, "-1": {"content": "y"}, "265": 3, "9" * 30: {"content": "z"}},
        "additional_special_tokens": [3, None, {}],
        "extra_special_tokens": "text",
        "add_bos_token": "yes",
    }
    assert with_template(None, **odd).encode("hi") == with_template(None).encode("hi")


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"model": {"type": "Surprise"}}'])
def test_a_broken_tokenizer_file_is_refused(make_llama: MakeLlama, content: bytes) -> None:
    folder = make_llama()
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(resolve_model(str(folder)))


def test_a_chat_of_a_vocabulary_smaller_than_the_embedding_stays_within_it(with_template: MakeTokenizer) -> None:
    tokenizer = with_template("{{ messages[0].content }}{{ eos_token }}")
    ids = tokenizer.encode_chat(user("".join(map(chr, range(1, 700)))))
    assert max(ids) < tokenizer.vocab_size == 265
