"""From messages to prompt over HTTP: contents, the chat template and its variables, control tokens, BOS."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from chat_calls import EOS, HI, SCRIPTED, Body, chat, chunks, installed, post, refused, say, user
from chats import THINKING, said
from http_server import ThreadServer, running_server
from tokenizers import Tokenizer, processors
from tokenyard import LLM, SamplingParams
from tokenyard.config import ServerConfig
from tokenyard.errors import ConfigError
from tokenyard.front_end import FrontEnd
from tokenyard.server.chat_template import check_chat_settings, server_template

SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
REFUSING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role, please') }}{% endif %}"
    "{% if loop.previtem and loop.previtem.role == m.role %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{{ m.content }}{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
SHOWS_TOOLS = (
    "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}({{ c.function.arguments.city }}){% endfor %}{% endfor %}"
)
ONE = {"max_tokens": 1, "return_token_ids": True, "return_prompt_text": True}


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path) -> Iterator[ThreadServer]:
    """With the model's own template, and requests may bring theirs."""
    overrides = ["server.trust_request_chat_template=true", SCRIPTED]
    with installed("script"), running_server(overrides, model=tiny_llama_dir) as running:
        yield running


@pytest.fixture(scope="module")
def thinking(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreadServer]:
    """With a template of the server's own, and variables for it; requests bring none."""
    file = tmp_path_factory.mktemp("template") / "thinking.jinja"
    file.write_text(THINKING, encoding="utf-8")
    overrides = [f"server.chat_template={file}", "server.default_chat_template_kwargs={enable_thinking: false}"]
    overrides += ["server.response_role=robot"]
    with running_server(overrides, model=tiny_llama_dir) as running:
        yield running


def prompt_ids(server: ThreadServer, messages: object, **fields: object) -> list[int]:
    ids: list[int] = chat(server, messages, **ONE, **fields)["prompt_token_ids"]
    return ids


def prompt_text(server: ThreadServer, messages: object, **fields: object) -> str:
    text: str = chat(server, messages, **ONE, **fields)["prompt_text"]
    return text


def part(text: str) -> Body:
    return {"type": "text", "text": text}


def test_api_17_parts_are_joined_and_null_is_empty(server: ThreadServer) -> None:
    assert prompt_ids(server, user([part("hi")])) == prompt_ids(server, user("hi"))
    assert prompt_ids(server, user([part("he"), part("hi")])) == prompt_ids(server, user("he\nhi"))
    without = [said("assistant", None), *user("hi")]
    assert prompt_ids(server, without) == prompt_ids(server, [said("assistant", ""), *user("hi")])


@pytest.mark.parametrize("kind", ["image_url", "input_audio", "file", "video_url", "nonsense"])
def test_api_17_parts_that_are_no_text_are_refused_with_their_place(server: ThreadServer, kind: str) -> None:
    error = refused(server, {"messages": user([part("hi"), {"type": kind, kind: {}}])})
    assert error["param"] == "messages[0].content[1]"
    assert kind in error["message"]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([said("system", "x"), *user("hi")], "no system role, please"),
        ([*user("hi"), *user("hi")], "roles must alternate"),
    ],
)
def test_api_18_the_templates_own_words_are_the_error(server: ThreadServer, messages: object, says: str) -> None:
    error = refused(server, {"messages": messages, "chat_template": REFUSING})
    assert says in error["message"]
    assert error["type"] == "BadRequestError"


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([said("foo", "hi")], "messages[0].role"),
        ([*user("hi"), said("tool", "3")], "messages[1].tool_call_id"),
        ([{"role": "user"}], "messages[0].content"),
        (user(3), "messages[0].content"),
        (["hi"], "messages[0]"),
        ("hi", "messages"),
        (None, "messages"),
        ([], "messages"),
    ],
)
def test_api_18_messages_that_do_not_hold_are_named(server: ThreadServer, messages: object, param: str) -> None:
    """API-18, API-02."""
    assert refused(server, {"messages": messages})["param"] == param


def test_api_18_a_model_without_a_template_takes_completions_only(tiny_llama_dir: Path, tmp_path: Path) -> None:
    folder = tmp_path / "plain"
    shutil.copytree(tiny_llama_dir, folder)
    (folder / "chat_template.jinja").unlink()
    with running_server(model=folder) as running:
        assert "no chat template" in refused(running, {"messages": user("hi")})["message"]
        status, _ = post(running, {"prompt": "hi", "max_tokens": 1}, "/v1/completions")
        assert status == 200


def test_api_19_a_chat_has_the_templates_bos_and_no_other(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """API-19: a tokenizer that adds a BOS, and a template that writes one; the same ids offline."""
    folder = tmp_path / "bos"
    shutil.copytree(tiny_llama_dir, folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|endoftext|>"}), encoding="utf-8")
    (folder / "chat_template.jinja").write_text(
        "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}", encoding="utf-8"
    )
    with running_server(model=folder) as running:
        answer = chat(running, user("hi"), **ONE)
        rendered = {"prompt": answer["prompt_text"], "max_tokens": 1, "return_token_ids": True}
        ids = json.loads(post(running, rendered, "/v1/completions")[1])["choices"][0]["prompt_token_ids"]
        without = {**rendered, "add_special_tokens": False}
        bare = json.loads(post(running, without, "/v1/completions")[1])["choices"][0]["prompt_token_ids"]
    with LLM(folder, dtype="float32", max_model_len=64, overrides=["kv_cache.num_blocks=8"]) as llm:
        offline = llm.chat(user("hi"), SamplingParams(max_tokens=1), use_tqdm=False)[0].prompt_token_ids
    assert answer["prompt_token_ids"] == offline == bare == [0, HI]
    assert ids == [0, 0, HI]  # completions add the tokenizer's own


@pytest.mark.parametrize("special", SPECIALS)
def test_d13_a_control_token_in_a_message_is_text(server: ThreadServer, special: str) -> None:
    ids = prompt_ids(server, user(f"a {special} b"))
    plain = prompt_ids(server, user("a b"))
    assert [token_id for token_id in ids if token_id < 3] == [token_id for token_id in plain if token_id < 3]
    assert special in prompt_text(server, user(f"a {special} b"))


def test_d15_a_request_may_bring_a_template_only_where_that_is_trusted(
    server: ThreadServer, thinking: ThreadServer
) -> None:
    fields = {"chat_template": "{{ messages[0].content }}!"}
    assert prompt_text(server, user("hi"), **fields) == "hi!"
    error = refused(thinking, {"messages": user("hi"), **fields})
    assert error["param"] == "chat_template"
    assert "trust_request_chat_template" in error["message"]


@pytest.mark.parametrize("name", ["tokenize", "chat_template", "messages", "add_generation_prompt", "raise_exception"])
def test_d15_variables_of_the_engine_cannot_be_given(server: ThreadServer, name: str) -> None:
    error = refused(server, {"messages": user("hi"), "chat_template_kwargs": {name: False}})
    assert error["param"] == "chat_template_kwargs"
    assert name in error["message"]


@pytest.mark.parametrize("given", [[1], "x", 3, {"enable_thinking": "x" * 5000}, {"nobody_reads_this": 1}])
def test_d15_variables_that_do_not_hold_are_refused(server: ThreadServer, given: object) -> None:
    error = refused(server, {"messages": user("hi"), "chat_template_kwargs": given})
    assert error["param"].startswith("chat_template_kwargs")


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{% for i in range(10**9) %}{% for j in range(10**9) %}x{% endfor %}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{% if %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_b10_a_template_reaches_nothing_and_runs_for_no_time(server: ThreadServer, template: str) -> None:
    """B10, D15: even where templates are trusted; the next chat is answered."""
    status, text = post(server, {"messages": user("hi"), "chat_template": template, "max_tokens": 1})
    assert status == 400, text
    assert "root:" not in text
    assert "class" not in json.loads(text)["error"]["message"].replace("__class__", "")
    assert chat(server, user("hi"), **say(HI, EOS))["choices"][0]["message"]["content"] == "hi"


def test_b11_a_target_in_a_body_is_only_a_name_that_nobody_reads(server: ThreadServer, tmp_path: Path) -> None:
    """B11: wherever it stands, nothing is called."""
    mark = tmp_path / "called"
    target = {"_target_": "pathlib.Path.touch", "self": str(mark), "_args_": [str(mark)]}
    bodies: list[Body] = [
        {**target},
        {"extra_args": target},
        {"chat_template_kwargs": {"documents": [target]}},
        {"scheduling": target},
        {"messages": [{**said("user", "hi"), **target}]},
        {"messages": [{**said("user", "hi"), "name": target}]},
        {"tools": [target], "tool_choice": "none"},
        {"response_format": target},
    ]
    for body in bodies:
        status, _ = post(server, {"messages": user("hi"), "max_tokens": 1, **body})
        assert status in (200, 400), body
    assert not mark.exists()


def test_the_servers_template_takes_the_place_of_the_models(thinking: ThreadServer) -> None:
    ending = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert prompt_text(thinking, user("hi")).endswith(ending)


def test_a_requests_variables_win_over_the_servers(thinking: ThreadServer) -> None:
    text = prompt_text(thinking, user("hi"), chat_template_kwargs={"enable_thinking": True})
    assert text.endswith("<|im_start|>assistant\n")


def test_answers_have_the_servers_role(thinking: ThreadServer) -> None:
    assert chat(thinking, max_tokens=1)["choices"][0]["message"]["role"] == "robot"
    assert chunks(thinking, max_tokens=1)[0]["choices"][0]["delta"]["role"] == "robot"


def test_reasoning_effort_is_for_templates_that_read_it(server: ThreadServer, thinking: ThreadServer) -> None:
    """`none` turns thinking off where the template knows how, and is what the others do anyway."""
    error = refused(server, {"messages": user("hi"), "reasoning_effort": "high"})
    assert error["param"] == "reasoning_effort"
    template = "{{ reasoning_effort }}{{ enable_thinking }}"
    assert prompt_text(server, user("hi"), reasoning_effort="low", chat_template=template) == "low"
    assert prompt_text(server, user("hi"), reasoning_effort="none", chat_template=template) == "noneFalse"
    assert prompt_text(server, user("hi"), reasoning_effort="none") == prompt_text(server, user("hi"))
    given = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}
    assert prompt_text(thinking, user("hi"), **given).endswith("<|im_start|>assistant\n")


def test_tools_are_shown_to_the_model_when_it_is_to_call_none(server: ThreadServer) -> None:
    shown = {"tools": TOOLS, "tool_choice": "none", "chat_template": SHOWS_TOOLS}
    assert prompt_text(server, user("hi"), **shown) == "[weather]hi"
    error = refused(server, {"messages": user("hi"), "tools": TOOLS, "tool_choice": "none"})
    assert (error["param"], "no place for tools" in error["message"]) == ("tools", True)


def test_earlier_tool_calls_reach_the_template_as_objects(server: ThreadServer) -> None:
    """The OpenAI API has arguments as JSON text, templates read them as objects."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Oslo"}'}}
    messages = [*user("hi"), {"role": "assistant", "content": None, "tool_calls": [call]}]
    messages.append({"role": "tool", "tool_call_id": "1", "content": "rain"})
    assert prompt_text(server, messages, chat_template=SHOWS_TOOLS) == "hi(Oslo)rain"
    call["function"] = {"name": "weather", "arguments": "Oslo"}
    error = refused(server, {"messages": messages})
    assert error["param"] == "messages[1].tool_calls[0].function.arguments"


def test_messages_and_contents_are_taken_as_they_are(server: ThreadServer) -> None:
    """No character is lost, and developers may speak."""
    text = "a\u0000b\u2028c \U0001f600 {{ 7 * 7 }} {% raw %} ${HOME}"
    assert text in prompt_text(server, [said("developer", text), *user("hi")])


def test_going_on_with_a_message_and_beginning_one_exclude_each_other(server: ThreadServer) -> None:
    body = {"messages": user("hi"), "continue_final_message": True, "add_generation_prompt": True}
    assert refused(server, body)["param"] == "continue_final_message"


class TestServerTemplate:
    def test_it_is_a_file_or_the_text_itself(self, tmp_path: Path) -> None:
        file = tmp_path / "a{b}.jinja"
        file.write_text("{{ messages }}", encoding="utf-8")
        assert server_template(ServerConfig()) is None
        assert server_template(ServerConfig(chat_template=str(file))) == "{{ messages }}"
        assert server_template(ServerConfig(chat_template="{{ 1 }}")) == "{{ 1 }}"

    @pytest.mark.parametrize("given", ["no/such/file.jinja", "", "{" * (2**20 + 1)])
    def test_anything_else_is_refused_at_the_start(self, given: str) -> None:
        with pytest.raises(ConfigError, match=r"server\.chat_template"):
            server_template(ServerConfig(chat_template=given))

    def test_a_file_that_is_no_text_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / "binary"
        file.write_bytes(b"\xff\xfe\x00")
        with pytest.raises(ConfigError, match="not UTF-8"):
            server_template(ServerConfig(chat_template=str(file)))


class TestChatSettings:
    @pytest.fixture
    def front(self, server: ThreadServer) -> FrontEnd:
        return server.llm.front

    def test_variables_that_the_template_does_not_read_are_refused(self, front: FrontEnd) -> None:
        config = ServerConfig(default_chat_template_kwargs={"nobody": 1})
        with pytest.raises(ConfigError, match=r"server\.default_chat_template_kwargs: .*nobody"):
            check_chat_settings(config, None, front.tokenizer)
        check_chat_settings(config, "{{ nobody }}", front.tokenizer)

    def test_a_template_that_does_not_compile_is_refused(self, front: FrontEnd) -> None:
        with pytest.raises(ConfigError, match=r"server\.chat_template: the chat template cannot be used"):
            check_chat_settings(ServerConfig(), "{% if %}", front.tokenizer)
