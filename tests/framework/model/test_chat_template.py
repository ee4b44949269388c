"""Chats into prompts: contents, the template's own words, variables, tools, and answers to go on with."""

from __future__ import annotations

from typing import Any

import pytest
from chats import THINKING, MakeTokenizer, refusal, said, sentencepiece_like, user
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.errors import ModelLoadError, UnsupportedError
from tokenyard.model.template_variables import MAX_TOOLS, MAX_VALUE
from tokenyard.model.tokenizer import Tokenizer

STRICT = (
    "{{ bos_token }}{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Roles must alternate') }}{% endif %}[{{ message['role'] }}] {{ message['content'] | trim }}"
    "{% if not loop.last %}\n{% endif %}{% endfor %}"
)
FANCY = (
    "{%- if tools %}\n    {{- '<tools>' }}\n    {%- for tool in tools %}\n        {{- tool | tojson }}\n"
    "    {%- endfor %}\n{%- endif %}\n"
    "{%- set ns = namespace(count=0) %}\n{%- for message in messages %}\n    {%- if message.role == 'system' %}\n"
    "        {%- continue %}\n    {%- endif %}\n    {%- set ns.count = ns.count + 1 %}\n"
    "    {%- generation %}{{- ns.count ~ ':' ~ message.content.split('\\n')[0] }}{% endgeneration %}\n"
    "{%- endfor %}\n    {% if add_generation_prompt %}\n>>{{ eos_token }}\n    {% endif %}\n"
)


def test_api_17_text_parts_and_plain_text_give_the_same_ids(tiny: Tokenizer) -> None:
    part = {"type": "text", "text": "hi"}
    assert tiny.encode_chat(user([part])) == tiny.encode_chat(user("hi"))
    assert tiny.encode_chat(user([part, part])) == tiny.encode_chat(user("hi\nhi"))
    null, empty = [said("assistant", None)], [said("assistant", "")]
    assert tiny.render_chat(null) == tiny.render_chat(empty)
    assert tiny.render_chat([{"role": "assistant"}]) == tiny.render_chat(empty)
    unknown: list[object] = [[{"type": "surprise"}], ["hi"], [3], 3, {"type": "text"}, [{"type": "text"}], b"x"]
    for kind in ("image_url", "input_audio"):
        assert isinstance(refusal(tiny.encode_chat, user([{"type": kind, kind: "x"}])), UnsupportedError)
    for content in unknown:
        assert "content" in str(refusal(tiny.encode_chat, user(content)))


def test_api_18_the_templates_own_words_reach_the_user(with_template: MakeTokenizer) -> None:
    strict = with_template(STRICT)
    system = [said("system", "x"), *user("y")]
    assert "System role not supported" in str(refusal(strict.render_chat, system))
    assert "Roles must alternate" in str(refusal(strict.encode_chat, [*user("a"), *user("b")]))
    none = with_template(None)
    assert not none.has_chat_template
    assert "no chat template" in str(refusal(none.encode_chat, user("hi")))
    assert "hi" in none.decode(none.encode("hi"))


def test_api_18_messages_that_do_not_hold_are_refused_with_their_place(tiny: Tokenizer) -> None:
    cases: list[tuple[object, str]] = [
        ([], "empty"),
        ("hi", "list"),
        ([3], "messages[0]"),
        ([said("foo", "x")], "foo"),
        ([said("usr", "x")], "did you mean 'user'"),
        ([{"content": "x"}], "role"),
        ([*user("a"), said("tool", "x")], "messages[1]"),
        ([{"role": "user"}], "no content"),
        ([{"role": "user", "content": "x", "extra": object()}], "extra"),
    ]
    for messages, words in cases:
        assert words in str(refusal(tiny.encode_chat, messages))


def test_api_18_a_template_of_bad_syntax_or_that_fails_is_one_error(with_template: MakeTokenizer) -> None:
    for template in (
        "{% for %}",
        "{{ messages.nothing.at.all }}",
        "{{ 1 / 0 }}",
        "{{ messages[9].content }}",
        "{{ x() }}",
    ):
        tokenizer = with_template(template)
        assert "template" in str(refusal(tokenizer.render_chat, user("hi")))


def test_api_19_a_chat_has_exactly_the_templates_bos_and_text_the_tokenizers() -> None:
    tokenizer = sentencepiece_like()
    ids = tokenizer.encode_chat(user("hi"))
    assert ids.count(1) == 1
    assert ids[0] == 1
    rendered = tokenizer.render_chat(user("hi"))
    assert tokenizer.encode(rendered, add_special_tokens=False) == ids
    assert tokenizer.encode("hi")[0] == 1
    assert 1 not in tokenizer.encode("hi", add_special_tokens=False)


def test_the_template_is_the_file_or_the_configs_default(with_template: MakeTokenizer) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert with_template(None, chat_template=named).render_chat(user("x")) == "D"
    assert with_template(None, chat_template="C").render_chat(user("x")) == "C"
    assert with_template("F", chat_template="C").render_chat(user("x")) == "F"
    assert not with_template(None, chat_template=named[:1]).has_chat_template
    with pytest.raises(ModelLoadError, match="chat_template"):
        with_template(None, chat_template=3)


@pytest.mark.parametrize("template", [STRICT, FANCY])
def test_rendering_agrees_with_transformers(with_template: MakeTokenizer, template: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokenizer = with_template(template)
    tool = {"type": "function", "function": {"name": "f", "description": "<b> & 'ü'"}}
    for content in ("hi", " <b>&\"' \n two ", ""):
        messages = [*user(content), said("assistant", "yes")]
        for add in (True, False):
            rendered = render_jinja_template(
                [messages],
                tools=[tool],
                chat_template=template,
                add_generation_prompt=add,
                bos_token="<|im_start|>",
                eos_token="<|im_end|>",
            )
            given: dict[str, Any] = {"tools": [tool]} if "tools" in template else {}
            assert tokenizer.render_chat(messages, add_generation_prompt=add, **given) == rendered[0][0]


@pytest.mark.parametrize("template", [STRICT, FANCY, "{% for m in messages %}{{ m.content | trim }}|{% endfor %}"])
@pytest.mark.parametrize("content", ["hi", " hi  ", "", " "])
def test_an_answer_that_is_gone_on_with_ends_where_transformers_ends_it(
    with_template: MakeTokenizer, template: str, content: str
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    messages = [*user("a"), said("assistant", content)]
    rendered = render_jinja_template(
        [messages],
        chat_template=template,
        continue_final_message=True,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
    )
    tokenizer = with_template(template)
    ours = tokenizer.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert ours == rendered[0][0]
    ids = tokenizer.encode_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert tokenizer.decode(ids, skip_special_tokens=False) == ours


@settings(max_examples=50, deadline=None)
@given(content=st.text(max_size=12))
def test_a_prompt_that_is_gone_on_with_is_the_whole_one_up_to_the_answers_end(tiny: Tokenizer, content: str) -> None:
    messages = [*user("a"), said("assistant", content)]
    whole = tiny.render_chat(messages, add_generation_prompt=False)
    begun = tiny.render_chat(messages, add_generation_prompt=False, continue_final_message=True)
    assert begun + "<|im_end|>\n" == whole


def test_going_on_with_an_answer_is_refused_when_there_is_nothing_to_go_on_with(
    tiny: Tokenizer, with_template: MakeTokenizer
) -> None:
    chat = [*user("a"), said("assistant", "b")]
    error = refusal(tiny.encode_chat, chat, add_generation_prompt=True, continue_final_message=True)
    assert "add_generation_prompt=False" in str(error)
    going_on: dict[str, Any] = {"add_generation_prompt": False, "continue_final_message": True}
    silent = with_template("{{ messages[0].content }}")
    assert "does not show" in str(refusal(silent.encode_chat, chat, **going_on))
    first_line = with_template("{{ messages[1].content.split('\n')[0] }}")
    assert "does not show" in str(refusal(first_line.encode_chat, [*user("a"), said("assistant", "b\n")], **going_on))


def test_d15_the_reasoning_switch_reaches_the_template(with_template: MakeTokenizer) -> None:
    tokenizer = with_template(THINKING)
    plain = tokenizer.render_chat(user("hi"))
    assert plain.endswith("assistant\n")
    without = tokenizer.encode_chat(user("hi"), chat_template_kwargs={"enable_thinking": False})
    assert tokenizer.decode(without, skip_special_tokens=False) == plain + "<think>\n\n</think>\n\n"
    assert tokenizer.render_chat(user("hi"), chat_template_kwargs={"enable_thinking": True}) == plain
    assert tokenizer.render_chat(user("hi"), chat_template_kwargs={}) == plain


def test_d15_variables_are_those_that_the_template_reads_and_those_that_all_models_know(
    tiny: Tokenizer, with_template: MakeTokenizer
) -> None:
    assert tiny.render_chat(user("x"), chat_template_kwargs={"enable_thinking": False}) == tiny.render_chat(user("x"))
    tokenizer = with_template("{% set mine = 1 %}{{ style }}{{ messages[0].content }}{{ mine }}{{ range(2) | length }}")
    assert tokenizer.render_chat(user("x"), chat_template_kwargs={"style": "dry "}) == "dry x12"
    for name in ("stile", "mine", "range", "nothing_like_it"):
        error = refusal(tokenizer.render_chat, user("x"), chat_template_kwargs={name: "y"})
        assert name in str(error)
    message = str(refusal(tokenizer.render_chat, user("x"), chat_template_kwargs={"stile": "y"}))
    assert "it uses style" in message
    assert "did you mean 'style'" in message


@pytest.mark.parametrize(
    "name",
    [
        "messages",
        "tools",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
        "chat_template",
        "raise_exception",
        "bos_token",
        "eos_token",
        "pad_token",
        "self",
        "namespace",
    ],
)
def test_d15_variables_of_the_engine_cannot_be_given(with_template: MakeTokenizer, name: str) -> None:
    tokenizer = with_template(f"{{{{ {name} }}}}{{{{ messages[0].content }}}}")
    assert name in str(refusal(tokenizer.render_chat, user("x"), chat_template_kwargs={name: "y"}))


def test_d15_variables_are_json_values_of_a_bounded_size(with_template: MakeTokenizer) -> None:
    tokenizer = with_template("{{ style }}{{ documents | length }}")
    nested: list[object] = []
    for _ in range(50):
        nested = [nested]
    bad: list[object] = [object(), {1, 2}, b"x", lambda: 1, nested, 10**5000, "x" * MAX_VALUE, ["x" * MAX_VALUE]]
    for value in bad:
        assert "style" in str(refusal(tokenizer.render_chat, user("x"), chat_template_kwargs={"style": value}))
    assert tokenizer.render_chat(user("x"), chat_template_kwargs={"style": "x" * 4000, "documents": [{}]}) == (
        "x" * 4000 + "1"
    )
    long = [{"text": "x" * 50_000}]
    assert tokenizer.render_chat(user("x"), chat_template_kwargs={"style": "", "documents": long}) == "1"
    refusal(tokenizer.render_chat, user("x"), chat_template_kwargs={"documents": long * 30})
    for wrong in (3, "style", [("style", 1)], {1: 2}):
        assert "chat_template_kwargs" in str(refusal(tokenizer.render_chat, user("x"), chat_template_kwargs=wrong))


def test_tools_reach_a_template_that_has_a_place_for_them(tiny: Tokenizer, with_template: MakeTokenizer) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    tokenizer = with_template(FANCY)
    assert '"name": "f"' in tokenizer.render_chat(user("x"), tools=[tool])
    assert tokenizer.render_chat(user("x"), tools=[]) == tokenizer.render_chat(user("x"), tools=None)
    assert "no place for tools" in str(refusal(tiny.encode_chat, user("x"), tools=[tool]))
    for wrong in ("f", 3, ["f"], [3], {"a": 1}, [tool] * (MAX_TOOLS + 1), [{"x": "y" * 2**20}], [{"x": object()}]):
        assert "tools" in str(refusal(tokenizer.encode_chat, user("x"), tools=wrong))


def test_chats_with_tools_take_the_template_named_for_them(with_template: MakeTokenizer) -> None:
    named = [{"name": "tool_use", "template": "T{{ tools | length }}"}, {"name": "default", "template": "D"}]
    tokenizer = with_template(None, chat_template=named)
    assert tokenizer.render_chat(user("x"), tools=[{}]) == "T1"
    assert tokenizer.render_chat(user("x")) == "D"


def test_a_template_that_is_given_takes_the_place_of_the_models(tiny: Tokenizer, with_template: MakeTokenizer) -> None:
    given = "{{ style }}:{{ messages[0].content }}{{ eos_token }}"
    ids = tiny.encode_chat(user("hi"), chat_template=given, chat_template_kwargs={"style": "s"})
    assert tiny.decode(ids, skip_special_tokens=False) == "s:hi<|im_end|>"
    assert with_template(None).render_chat(user("hi"), chat_template="{{ messages[0].role }}") == "user"
    for wrong in (3, "x" * 2**21, ["x"]):
        assert "chat_template" in str(refusal(tiny.render_chat, user("hi"), chat_template=wrong))
    assert "template" in str(refusal(tiny.render_chat, user("hi"), chat_template="{% if %}"))


def test_reasoning_is_there_under_the_names_that_templates_read(with_template: MakeTokenizer) -> None:
    tokenizer = with_template("{{ messages[1].reasoning_content }}|{{ messages[1].thinking }}")
    for name in ("reasoning_content", "reasoning", "thinking"):
        answer = {**said("assistant", "b"), name: "why"}
        assert tokenizer.render_chat([*user("a"), answer]) == "why|why"
    assert tokenizer.render_chat([*user("a"), said("assistant", "b")]) == "|"


@pytest.mark.parametrize("given", [{"city": "Oslo"}, '{"city": "Oslo"}'], ids=["object", "text"])
def test_arguments_of_tool_calls_reach_the_template_as_objects(with_template: MakeTokenizer, given: object) -> None:
    tokenizer = with_template("{{ messages[1].tool_calls[0].function.arguments.city }}")
    call = {"type": "function", "function": {"name": "weather", "arguments": given}}
    assert tokenizer.render_chat([*user("a"), {"role": "assistant", "tool_calls": [call]}]) == "Oslo"


@pytest.mark.parametrize("given", ["Oslo", "[1]", '{"city"', '{"a": NaN}', "{" * 10**5, '{"a":' * 10**5])
def test_arguments_that_are_no_json_object_are_refused_with_their_place(tiny: Tokenizer, given: str) -> None:
    call = {"type": "function", "function": {"name": "weather", "arguments": given}}
    error = refusal(tiny.render_chat, [*user("a"), {"role": "assistant", "tool_calls": [call]}])
    assert error.parameter == "messages[1].tool_calls[0].function.arguments"


def test_the_variables_of_a_template_are_those_that_it_reads(tiny: Tokenizer, with_template: MakeTokenizer) -> None:
    assert with_template("{% set a = 1 %}{{ a }}{{ b }}").chat_variables() == {"b"}
    assert tiny.chat_variables("{{ c }}") == {"c"}
    assert "cannot be used" in str(refusal(tiny.chat_variables, "{% if %}"))
    assert "no chat template" in str(refusal(with_template(None).chat_variables))


def test_what_a_template_sees_of_a_string_is_its_text(with_template: MakeTokenizer) -> None:
    class Shouting(str):
        def __str__(self) -> str:
            return self.upper()

    assert with_template("{{ messages[0].content }}").render_chat(user(Shouting("hi"))) == "hi"


def test_a_message_nested_without_end_is_refused(tiny: Tokenizer) -> None:
    deep: object = "x"
    for _ in range(10_000):
        deep = [deep]
    assert "nested" in str(refusal(tiny.encode_chat, [{"role": "user", "content": "a", "extra": deep}]))
