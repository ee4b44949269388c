"""What users write is never a control token, wherever they write it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import tokenizers
from chats import MakeTokenizer, refusal, said, sentencepiece_like, user
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenyard.model.tokenizer import Tokenizer

SPECIAL_TEXTS = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "end|>", "hi", " ", "\n", "ü", "1", "<think>"]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=200, deadline=None)
@given(first=SPECIAL_TEXTS, second=SPECIAL_TEXTS)
def test_d13_what_a_message_spells_is_never_control_and_reads_back_unchanged(
    tiny: Tokenizer, first: str, second: str
) -> None:
    messages = [*user(first), said("assistant", second)]
    ids = tiny.encode_chat(messages)
    frame = tiny.encode_chat([*user("x"), said("assistant", "x")])
    assert [i for i in ids if i in tiny.special_ids] == [i for i in frame if i in tiny.special_ids]
    assert tiny.decode(ids, skip_special_tokens=False) == tiny.render_chat(messages)


@given(content=st.text(max_size=20))
def test_a_chat_without_control_names_encodes_as_its_rendered_text(tiny: Tokenizer, content: str) -> None:
    messages = user(content)
    ids = tiny.encode_chat(messages)
    assert ids == tiny.encode(tiny.render_chat(messages), add_special_tokens=False)
    assert ids == tiny._guard.encode_marked(tiny.render_chat(messages))  # the guarded way is the same encoder


def test_control_names_in_other_fields_and_variables_are_text_too(with_template: MakeTokenizer) -> None:
    tokenizer = with_template("{{ messages[0].name }}{{ tools | tojson }}{{ messages[0].content }}{{ eos_token }}")
    ids = tokenizer.encode_chat(
        [{"role": "user", "content": "<|im_end|>", "name": "<|im_start|>"}], tools=[{"<|im_end|>": "<|im_end|>"}]
    )
    assert [index for index in ids if index in tokenizer.special_ids] == [2]


def test_a_control_name_that_the_vocabulary_itself_spells_is_refused() -> None:
    vocabulary = {token: index for index, token in enumerate(["</s>", "<", "/", "s", ">", "</", "</s", "a"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, [("<", "/"), ("</", "s"), ("</s", ">")]))
    backend.add_special_tokens([AddedToken("</s>", normalized=False)])
    tokenizer = Tokenizer(backend, {"eos_token": "</s>"}, "{{ messages[0].content }}{{ eos_token }}")
    assert tokenizer.encode_chat(user("a")) == [7, 0]
    assert "</s>" in str(refusal(tokenizer.encode_chat, user("a</s>")))


def test_text_that_only_normalising_turns_into_a_control_name_stays_text() -> None:
    vocabulary = {token: index for index, token in enumerate(["<e>", "<", "e", ">"])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.normalizer = normalizers.Lowercase()
    backend.add_special_tokens([AddedToken("<e>", normalized=True)])
    tokenizer = Tokenizer(backend, {"eos_token": "<e>"}, "{{ messages[0].content }}{{ eos_token }}")
    assert tokenizer.encode_chat(user("<E>")) == [1, 2, 3, 0]


BESIDE = (
    "{{ bos_token }}{% for m in messages %}{{ m.name }}{{ m.content }}{% endfor %}"
    "{{ tools | tojson }}{{ style }}{{ eos_token }}"
)


def bracket_style() -> Tokenizer:
    """Control tokens in square brackets, as Mistral has them."""
    names = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[TOOL_CALLS]")
    vocabulary = {name: index for index, name in enumerate([*names, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(name, normalized=False) for name in names])
    return Tokenizer(backend, {"bos_token": "<s>", "eos_token": "</s>"}, BESIDE)


def names_of(tokenizer: Tokenizer) -> list[str]:
    return [str(tokenizer.id_to_token(index)) for index in sorted(tokenizer.special_ids)]


@pytest.mark.parametrize("make", [bracket_style, sentencepiece_like])
def test_d13_every_control_token_is_text_in_messages_tools_and_variables(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for name in names_of(tokenizer):
        message = {"role": "user", "content": f"a {name} b{name}", "name": name, name: name}
        ids = tokenizer.encode_chat(
            [message],
            chat_template=BESIDE,
            tools=[{"name": name, name: [name]}],
            chat_template_kwargs={"style": name},
        )
        assert ids[0] == tokenizer.token_to_id("<s>")
        assert ids[-1] == tokenizer.token_to_id("</s>")
        assert not tokenizer.special_ids & set(ids[1:-1])
        assert tokenizer.decode(ids[1:-1]).count(name) == 7


@pytest.mark.parametrize("make", [bracket_style, sentencepiece_like])
def test_d13_two_texts_side_by_side_do_not_make_a_control_token(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    for name in names_of(tokenizer):
        for cut in range(1, len(name)):
            for space in ("", " "):
                chat = [said("user", f"{space}x{name[:cut]}{space}"), said("user", f"{space}{name[cut:]}x{space}")]
                template = "{{ bos_token }}{% for m in messages %}{{ m.content | trim }}{% endfor %}"
                ids = tokenizer.encode_chat(chat, chat_template=template)
                assert not tokenizer.special_ids & set(ids[1:])
                assert tokenizer.decode(ids[1:]).endswith(f"x{name}x")


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_d13_no_row_of_texts_makes_a_control_token(data: st.DataObject) -> None:
    tokenizer = BRACKETS
    names = names_of(tokenizer)
    pieces = st.one_of(
        st.sampled_from([part for name in names for part in (name, name[:2], name[2:], name[-1])]), st.text(max_size=2)
    )
    texts = data.draw(st.lists(st.lists(pieces, max_size=3).map("".join), min_size=1, max_size=4))
    chat = [said("user", text) for text in texts]
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    ids = tokenizer.encode_chat(chat, chat_template=template)
    assert not tokenizer.special_ids & set(ids[1:])
    assert tokenizer.decode(ids[1:]) == "".join(texts)


BRACKETS = bracket_style()
