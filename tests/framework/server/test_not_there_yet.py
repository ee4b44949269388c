"""What robustness.md asks of features that are not there: they are refused by name, over HTTP and at the start."""

from __future__ import annotations

import json

import pytest
from chat_calls import Body, post, refused, user
from http_server import ThreadServer
from tokenyard.cli import run

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
JSON_SCHEMA = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nonsense"}}}
TOOL = {"type": "function", "function": {"name": "f"}}
FIELDS: list[tuple[str, str, object]] = [
    ("A8", "logits_processors", ["gASVKAAAAAAAAACMBXBvc2l4lIwGc3lzdGVt"]),
    ("A10 D21", "kv_transfer_params", {"do_remote_decode": True, "remote_host": "10.0.0.1"}),
    ("A10 D21 encoder", "ec_transfer_params", {"remote_host": "10.0.0.1"}),
    ("D2", "response_format", JSON_SCHEMA),
    ("D2 unclosed group", "guided_regex", "("),
    ("D3", "guided_regex", "(a+)+b"),
    ("D4", "guided_grammar", "(" * 30_000),
    ("D4 enum", "guided_choice", ["a"] * 10_000),
    ("D5", "guided_json", {"type": "object"}),
    ("D5 structured", "structured_outputs", {"json": {"type": "object"}}),
    ("D16", "prompt_embeds", "gASVAA=="),
    ("lora", "lora_request", {"lora_name": "a", "lora_path": "../a"}),
]
TOOLS: list[tuple[str, Body]] = [
    ("D2 D17", {"tools": [TOOL]}),
    ("D17 required", {"tools": [TOOL], "tool_choice": "required"}),
    ("D17 legacy", {"functions": [{"name": "f"}]}),
]
PATHS = [
    ("A9", "/server_info"),
    ("A9 weights", "/update_weights"),
    ("A10 store", "/v1/kv_transfer"),
    ("A11 jobs", "/api/jobs/"),
    ("A12", "/dashboard"),
    ("D19", "/v1/files"),
    ("D19 audio", "/v1/audio/transcriptions"),
    ("embeddings", "/v1/embeddings"),
    ("pooling", "/pooling"),
    ("score", "/v1/score"),
    ("rerank", "/v1/rerank"),
    ("responses", "/v1/responses"),
    ("lora adapters", "/v1/load_lora_adapter"),
    ("E3 invocations", "/invocations"),
]
STARTS = [
    ("A11", ["executor=ray"], "unknown executor 'ray'"),
    ("A13", ["executor=ray", "executor.address=ray://10.0.0.1:10001"], "executor"),
    ("A11 flag", ["--distributed-executor-backend", "ray"], "unknown executor 'ray'"),
    ("A10", ["--kv-transfer-config", "{}"], "--kv-transfer-config is not available"),
    ("A10 key", ["kv_transfer.connector=nixl"], "kv_transfer"),
    ("A5", ["--kv-events-config", "{}"], "--kv-events-config is not available"),
    ("A12", ["dashboard.port=8265"], "dashboard"),
    ("D3", ["--guided-decoding-backend", "xgrammar"], "--guided-decoding-backend is not available"),
    ("D4", ["--structured-outputs-config", "{}"], "--structured-outputs-config is not available"),
    ("D16", ["--enable-prompt-embeds"], "--enable-prompt-embeds is not available"),
    ("D17", ["--tool-call-parser", "hermes"], "--tool-call-parser is not available"),
    ("D17 plugin", ["--tool-parser-plugin", "a.py"], "--tool-parser-plugin is not available"),
    ("B3", ["--trust-remote-code"], "--trust-remote-code is not available"),
]


@pytest.mark.parametrize("path", [CHAT, COMPLETION])
@pytest.mark.parametrize(("case", "name", "value"), FIELDS, ids=[case for case, *_ in FIELDS])
def test_a_field_of_a_feature_that_is_not_there_is_refused_by_name(
    server: ThreadServer, path: str, case: str, name: str, value: object
) -> None:
    prompt: Body = {"messages": user("hi")} if path == CHAT else {"prompt": "hi"}
    error = refused(server, {**prompt, name: value}, path=path)
    assert error["param"] == name
    assert f"{name}=" in error["message"]
    assert "not available in this version" in error["message"]


@pytest.mark.parametrize("fields", [fields for _, fields in TOOLS], ids=[case for case, _ in TOOLS])
def test_tools_are_refused_by_name(server: ThreadServer, fields: Body) -> None:
    error = refused(server, {"messages": user("hi"), **fields})
    assert error["param"] in fields


def test_g4_an_image_is_refused_where_it_stands(server: ThreadServer) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    assert refused(server, {"messages": user([image])})["param"] == "messages[0].content[0]"


@pytest.mark.parametrize("path", [path for _, path in PATHS], ids=[case for case, _ in PATHS])
def test_an_endpoint_that_is_not_there_is_not_found_by_any_method(server: ThreadServer, path: str) -> None:
    for status, text in (post(server, {"input": "hi"}, path), server.get(path)):
        assert status == 404
        assert json.loads(text)["error"]["type"] == "NotFoundError"


@pytest.mark.parametrize(("case", "arguments", "says"), STARTS, ids=[case for case, *_ in STARTS])
def test_a_setting_of_a_feature_that_is_not_there_stops_the_start(
    capsys: pytest.CaptureFixture[str], case: str, arguments: list[str], says: str
) -> None:
    assert run(["serve", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert says in line
