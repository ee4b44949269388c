from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, processors
from tokenyard.errors import ModelLoadError, TokenyardError, UnsupportedError, ValidationError
from tokenyard.model.files import resolve_model
from tokenyard.model.text_stream import TextStream
from tokenyard.model.tokenizer import Tokenizer, load_tokenizer

MakeLlama = Callable[..., Path]
Messages = Sequence[Mapping[str, object]]

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


def said(role: str, content: object) -> dict[str, object]:
    return {"role": role, "content": content}


def user(content: object) -> list[dict[str, object]]:
    return [said("user", content)]


def refusal(call: Callable[..., object], *args: object, **kwargs: object) -> ValidationError:
    with pytest.raises(ValidationError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return caught.value


@pytest.fixture(scope="session")
def tiny(tiny_llama_dir: Path) -> Tokenizer:
    return load_tokenizer(resolve_model(str(tiny_llama_dir)))


@pytest.fixture
def with_template(make_llama: MakeLlama) -> Callable[..., Tokenizer]:
    """The tiny tokenizer with another chat template (None: without one) or other settings."""

    def make(template: str | None, **config: object) -> Tokenizer:
        folder = make_llama()
        (folder / "chat_template.jinja").unlink()
        if template is not None:
            (folder / "chat_template.jinja").write_text(template)
        path = folder / "tokenizer_config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **config}))
        return load_tokenizer(resolve_model(str(folder)))

    return make


def sentencepiece_like() -> Tokenizer:
    """Byte fallback, metaspace, a BOS by default: the style of Llama 2."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2}
    vocabulary |= {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ("▁", "h", "i", "▁hi", "ab", "▁a", "a", "b", "▁ab", "</", "s", ">"):
        vocabulary.setdefault(piece, len(vocabulary))
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("h", "i")]
    vocabulary.setdefault("hi", len(vocabulary))
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(text, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    config = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(
        backend, config, "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    )


def test_encoding_and_decoding_agree(tiny: Tokenizer) -> None:
    ids = tiny.encode("hi the 12 ü😀")
    assert tiny.decode(ids) == "hi the 12 ü😀"
    assert tiny.decode([]) == ""
    assert tiny.id_to_token(2) == "<|im_end|>"
    assert tiny.token_to_id("<|im_end|>") == 2
    assert tiny.id_to_token(10**9) is None
    assert tiny.vocab_size == 265
    assert tiny.decode([10**6]) == ""
    with pytest.raises(ValidationError):
        tiny.decode([-1])


def test_control_tokens_in_text_are_parsed_only_when_asked_for(tiny: Tokenizer) -> None:
    text = "hi <|im_end|> the"
    assert 2 in tiny.encode(text)
    ids = tiny.encode(text, parse_special=False)
    assert not tiny.special_ids & set(ids)
    assert tiny.decode(ids) == text


def test_settings_of_a_training_run_in_the_file_do_not_cut_or_pad(make_llama: MakeLlama) -> None:
    folder = make_llama()
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.enable_truncation(3)
    backend.enable_padding(length=50)
    backend.save(str(folder / "tokenizer.json"))
    assert len(load_tokenizer(resolve_model(str(folder))).encode("abcdefgh")) == 8


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


def test_api_18_the_templates_own_words_reach_the_user(with_template: Callable[..., Tokenizer]) -> None:
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


def test_api_18_a_template_of_bad_syntax_or_that_fails_is_one_error(with_template: Callable[..., Tokenizer]) -> None:
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


@pytest.mark.parametrize("flag", [True, False])
def test_the_configs_bos_flag_rules_over_the_tokenizer_file(
    with_template: Callable[..., Tokenizer], flag: bool
) -> None:
    assert with_template(None, add_bos_token=flag).encode("")[:1] == ([1] if flag else [])


def test_tokens_that_only_the_config_has_are_added(with_template: Callable[..., Tokenizer]) -> None:
    spec = {"content": "<|call|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    tokenizer = with_template(None, added_tokens_decoder={"265": spec})
    assert tokenizer.encode("<|call|>") == [265]
    assert tokenizer.decode([265]) == ""
    with pytest.raises(ModelLoadError, match="999"):
        with_template(None, added_tokens_decoder={"999": spec})


def test_the_template_is_the_file_or_the_configs_default(with_template: Callable[..., Tokenizer]) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    assert with_template(None, chat_template=named).render_chat(user("x")) == "D"
    assert with_template(None, chat_template="C").render_chat(user("x")) == "C"
    assert with_template("F", chat_template="C").render_chat(user("x")) == "F"
    assert not with_template(None, chat_template=named[:1]).has_chat_template
    with pytest.raises(ModelLoadError, match="chat_template"):
        with_template(None, chat_template=3)


@pytest.mark.parametrize("template", [STRICT, FANCY])
def test_rendering_agrees_with_transformers(with_template: Callable[..., Tokenizer], template: str) -> None:
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
            assert tokenizer.render_chat(messages, add_generation_prompt=add, tools=[tool]) == rendered[0][0]


def test_template_variables_of_the_engine_cannot_be_given(tiny: Tokenizer) -> None:
    for name in ("bos_token", "tokenize", "chat_template", "raise_exception"):
        variables: dict[str, object] = {name: "y"}
        assert name in str(refusal(tiny.render_chat, user("x"), **variables))
    refusal(tiny.render_chat, user("x"), tools=object())


SPECIAL_TEXTS = st.lists(
    st.sampled_from(
        ["<|im_end|>", "<|im_start|>", "<|endoftext|>", "<|im_", "end|>", "hi", " ", "\n", "ü", "1", "<think>"]
    ),
    max_size=8,
).map("".join)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
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


def test_control_names_in_other_fields_and_variables_are_text_too(with_template: Callable[..., Tokenizer]) -> None:
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


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ raise_exception.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ ('%s' | attr('__class__')) }}",
    "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
    "{{ lipsum.__globals__['os'] }}",
]
BOMBS = [
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set s = 'ab' * 5000 %}{% for a in s %}{% for b in s %}{% for c in s %}{% endfor %}{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "{{ 'x' * 10000000000 }}",
    "{{ 'x' ** 3 }}{{ 9 ** 9 ** 9 ** 9 }}",
    "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(s='xxxxxxxx') %}{% for i in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for i in range(60) %}{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}{% endfor %}",
    "{{ 'x'.ljust(10000000000) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10000000000, 1) }}",
    "{{ '{:{w}}'.format(1, w=10000000000) }}",
    "{{ '{:10000000000}'.format(1) }}",
    "{{ 'x' | center(10000000000) }}",
    "{{ 'x\nx' | indent(10000000000) }}",
    "{% for x in [1] recursive %}{{ loop([1]) }}{{ loop([1]) }}{% endfor %}",
]


@pytest.mark.parametrize("template", ESCAPES)
def test_b10_a_template_cannot_reach_python(with_template: Callable[..., Tokenizer], template: str) -> None:
    tokenizer = with_template(template)
    try:
        rendered = tokenizer.render_chat(user("hi"))
    except TokenyardError:
        return
    assert "class" not in rendered
    assert "uid" not in rendered


@pytest.mark.parametrize("template", BOMBS)
def test_b10_a_template_cannot_run_or_grow_without_end(with_template: Callable[..., Tokenizer], template: str) -> None:
    tokenizer = with_template(template)
    start = time.monotonic()
    refusal(tokenizer.render_chat, user("hi"))
    assert time.monotonic() - start < 10


def collect(tokenizer: Tokenizer, ids: Sequence[int], skip: bool = True) -> list[str]:
    stream = tokenizer.new_stream(skip)
    return [delta for index in ids if (delta := stream.step(index)) is not None] + [stream.flush()]


def test_txt_07_no_delta_shows_half_a_character(tiny: Tokenizer) -> None:
    ids = tiny.encode("你好😀ď")
    deltas = collect(tiny, ids)
    assert all("\ufffd" not in delta for delta in deltas)
    assert "".join(deltas) == "你好😀ď"
    assert [delta for delta in deltas if delta] == list("你好😀ď")


@settings(max_examples=300, deadline=None)
@given(text=st.text(max_size=30), ids=st.lists(st.integers(0, 270), max_size=60), skip=st.booleans())
def test_txt_07_deltas_add_up_to_the_full_decode_for_any_ids(
    tiny: Tokenizer, text: str, ids: list[int], skip: bool
) -> None:
    everything = tiny.encode(text) + ids
    assert "".join(collect(tiny, everything, skip)) == tiny.decode(everything, skip_special_tokens=skip)


@given(text=st.text(alphabet="ab hi\n你😀ü", max_size=30))
def test_txt_07_byte_fallback_and_leading_spaces_add_up_too(text: str) -> None:
    tokenizer = sentencepiece_like()
    ids = tokenizer.encode(text, add_special_tokens=False)
    deltas = collect(tokenizer, ids)
    assert "".join(deltas) == tokenizer.decode(ids)
    assert all("\ufffd" not in delta for delta in deltas)


def test_txt_07_withheld_text_is_bounded_and_flushed(tiny: Tokenizer) -> None:
    start_byte = tiny.encode("😀")[0]
    stream = tiny.new_stream()
    shown = sum(len(stream.step(start_byte) or "") for _ in range(1000))
    assert shown >= 997
    assert shown + len(stream.flush()) == 1000


@pytest.mark.parametrize("garbage", [True, False])
def test_a_step_never_decodes_more_than_a_bounded_window(tiny: Tokenizer, garbage: bool) -> None:
    seen: list[int] = []

    def decode(ids: Sequence[int]) -> str:
        seen.append(len(ids))
        return tiny.decode(ids)

    text = tiny.encode("😀")[:1] * 300 if garbage else tiny.encode("hi 😀" * 100) + [9999] * 300
    stream = TextStream(decode, skipped_ids=frozenset())
    assert "".join([*(stream.step(index) or "" for index in text), stream.flush()]) == tiny.decode(text)
    assert max(seen) <= 40


def test_a_stream_with_the_prompts_end_keeps_a_leading_space() -> None:
    tokenizer = sentencepiece_like()
    prompt, answer = tokenizer.encode("hi"), tokenizer.encode("ab", add_special_tokens=False)
    alone, after = tokenizer.new_stream(), tokenizer.new_stream(prompt_ids=prompt)
    assert (alone.step(answer[0]), after.step(answer[0])) == ("ab", " ab")


@pytest.mark.parametrize("content", [b"", b"{}", b"not json", b'{"model": {"type": "Surprise"}}'])
def test_a_broken_tokenizer_file_is_refused(make_llama: MakeLlama, content: bytes) -> None:
    folder = make_llama()
    (folder / "tokenizer.json").write_bytes(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json"):
        load_tokenizer(resolve_model(str(folder)))


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
