"""The server's part of the config: its flags, and the ranges of its keys."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import TYPE_CHECKING

import pytest
from tokenyard.config import ServerConfig
from tokenyard.errors import ConfigError, UserError
from tokenyard.launch.compose import compose_config, load_engine_config
from tokenyard.launch.flag_values import Flag, number
from tokenyard.launch.flags import add_engine_flags, flags_to_overrides
from tokenyard.launch.server_flags import SERVER_FLAGS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.catalogue import Catalogue


def overrides(arguments: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser, is_server=True)
    return [flagged.override for flagged in flags_to_overrides(parser.parse_args(arguments))]


FLAGS: list[tuple[list[str], str, object]] = [
    (["--host", "0.0.0.0"], "host", "0.0.0.0"),
    (["--port=0"], "port", 0),
    (["--uds", "/run/a b.sock"], "uds", "/run/a b.sock"),
    (["--root-path", "/llm"], "root_path", "/llm"),
    (["--served-model-name", "a", "--served-model-name", "b c"], "served_model_name", ("a", "b c")),
    (["--response-role", "bot"], "response_role", "bot"),
    (["--chat-template", "{{ messages }}"], "chat_template", "{{ messages }}"),
    (
        ["--default-chat-template-kwargs", '{"thinking": false, "x": [1, null, "${a}"], "y": {"z": 1.5}}'],
        "default_chat_template_kwargs",
        {"thinking": False, "x": [1, None, "${a}"], "y": {"z": 1.5}},
    ),
    (["--trust-request-chat-template"], "trust_request_chat_template", True),
    (["--ssl-keyfile", "k"], "ssl_keyfile", "k"),
    (["--ssl-certfile", "c"], "ssl_certfile", "c"),
    (["--ssl-ca-certs", "ca"], "ssl_ca_certs", "ca"),
    (["--allowed-origins", '["https://a.b", "*"]'], "allowed_origins", ("https://a.b", "*")),
    (["--allowed-origins", "https://a.b", "--allowed-origins", "*"], "allowed_origins", ("https://a.b", "*")),
    (["--allowed-hosts", "*.example.org"], "allowed_hosts", ("*.example.org",)),
    (["--shutdown-timeout", "30"], "shutdown_timeout", 30.0),
    (["--max-num-queued-reqs", "2k"], "max_num_queued_reqs", 2000),
    (["--max-num-queued-tokens", "1M"], "max_num_queued_tokens", 2**20),
    (["--request-timeout", "1.5"], "request_timeout", 1.5),
    (["--slow-reader-timeout", "1"], "slow_reader_timeout", 1.0),
    (["--stall-timeout", "5"], "stall_timeout", 5.0),
    (["--restart-engine"], "restart_engine", True),
    (["--enable-log-requests"], "log_requests", True),
    (["--enable-log-requests", "--disable-log-requests"], "log_requests", False),
    (["--log-stats-interval", "0"], "log_stats_interval", 0.0),
    (["--otlp-traces-endpoint", "http://x:1/v1/traces"], "otlp_traces_endpoint", "http://x:1/v1/traces"),
]


@pytest.mark.parametrize(("arguments", "key", "expected"), FLAGS, ids=[case[0][0] for case in FLAGS])
def test_a_flag_sets_its_key(arguments: list[str], key: str, expected: object, catalogue: Catalogue) -> None:
    config, _ = load_engine_config(overrides(arguments), catalogue=catalogue)
    assert getattr(config.server, key) == expected
    changed = [
        field.name
        for field in fields(ServerConfig)
        if getattr(config.server, field.name) != getattr(ServerConfig(), field.name)
    ]
    assert changed in ([key], [])


def test_every_flag_has_a_case() -> None:
    tried = {word.partition("=")[0] for arguments, _, _ in FLAGS for word in arguments}
    assert {flag.name for flag in SERVER_FLAGS} - tried == {"--disable-log-stats"}


@pytest.mark.parametrize("flag", [flag for flag in SERVER_FLAGS if flag.is_inverted], ids=lambda flag: flag.name)
def test_what_is_disabled_is_not_disabled_twice(flag: Flag) -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser, is_server=True)
    negated = "--no-" + flag.name.removeprefix("--")
    assert parser.parse_known_args([negated])[1] == [negated]


def test_help_names_the_unit_and_the_default_of_every_time() -> None:
    times = [flag for flag in SERVER_FLAGS if flag.convert is number]
    assert len(times) > 4
    for flag in times:
        assert flag.metavar == "SECONDS"
        default = getattr(ServerConfig(), flag.key.removeprefix("server."))
        assert f"default {default:g}" in flag.help if default is not None else "default: no limit" in flag.help


def test_a_served_name_may_be_one_text(catalogue: Catalogue) -> None:
    config, _ = load_engine_config(["server.served_model_name=mine"], catalogue=catalogue)
    assert config.server.served_model_names == ("mine",)
    with pytest.raises(ConfigError, match="printable"):
        load_engine_config(["server.served_model_name=''"], catalogue=catalogue)


def test_disable_log_stats_turns_off_those_of_the_engine(catalogue: Catalogue) -> None:
    assert not load_engine_config(overrides(["--disable-log-stats"]), catalogue=catalogue)[0].engine.log_stats


@pytest.mark.parametrize(
    ("arguments", "piece"),
    [
        (["--port", "http"], "--port takes a whole number"),
        (["--default-chat-template-kwargs", "[1]"], "a JSON object"),
        (["--default-chat-template-kwargs", "{x"], "takes JSON"),
        (["--default-chat-template-kwargs", '{"a b": 1}'], "'a b' is not a name"),
        (["--allowed-origins", "[1]"], "a JSON list of texts"),
        (["--allowed-origins", "[x"], "takes JSON"),
        (["--shutdown-timeout", "soon"], "--shutdown-timeout takes a number"),
        (["--ssl-cert-reqs", "1"], "not available"),
    ],
)
def test_a_flag_with_a_wrong_value_is_named(arguments: list[str], piece: str) -> None:
    with pytest.raises(ConfigError, match=piece.replace("[", r"\[")):
        overrides(arguments)


@pytest.mark.parametrize("flag", ["--port", "--host", "--api-key", "--served-model-name", "--restart-engine"])
def test_another_command_says_that_a_flag_is_one_of_serve(flag: str) -> None:
    parser = argparse.ArgumentParser()
    add_engine_flags(parser)
    with pytest.raises(ConfigError, match=f"{flag} is a flag of `tokenyard serve`"):
        parser.parse_args([flag, "1"])


def test_template_variables_may_be_given_as_overrides_too(catalogue: Catalogue) -> None:
    for given in (
        ["server.default_chat_template_kwargs={a:1,b:x}"],
        ["server.default_chat_template_kwargs.a=1", "server.default_chat_template_kwargs.b=x"],
    ):
        config, _ = load_engine_config(given, catalogue=catalogue)
        assert config.server.default_chat_template_kwargs == {"a": 1, "b": "x"}


REFUSED = {
    "server.host=''": "server.host",
    "server.port=-1": "0 for one that is free",
    "server.port=65536": "65535",
    "server.uds=''": "server.uds",
    "server.root_path=llm": "server.root_path",
    "server.root_path=/llm/": "without a slash at its end",
    "server.root_path='/a?b'": "server.root_path",
    "server.served_model_name=['']": "printable",
    "server.served_model_name=[a,a]": "differ",
    "server.response_role=''": "server.response_role",
    "server.ssl_keyfile=''": "server.ssl_keyfile",
    "server.allowed_origins=[chat.example.org]": "https://",
    "server.allowed_hosts=['a:80']": "without a port",
    "server.shutdown_timeout=-1": "0 or more",
    "server.shutdown_timeout=.inf": "server.shutdown_timeout",
    "server.shutdown_timeout=nan": "server.shutdown_timeout",
    "server.request_timeout=0": "above 0",
    "server.slow_reader_timeout=0": "above 0",
    "server.stall_timeout=0": "above 0",
    "server.log_stats_interval=-1": "0 or more",
    "server.max_num_queued_reqs=0": "from 1",
    "server.max_num_queued_tokens=0": "from 1",
    "server.max_n=0": "from 1",
    "server.max_prompts=0": "from 1",
    "server.max_body_bytes=10": "from 1024",
    "server.timeline_size=-1": "from 0",
    "server.otlp_traces_endpoint=localhost": "a URL",
    "server.prot=1": "did you mean 'server.port'",
    "server.api_key=x": "unknown key",
}


@pytest.mark.parametrize("override", REFUSED)
def test_a_value_out_of_its_range_is_one_clear_line(override: str, catalogue: Catalogue) -> None:
    with pytest.raises(UserError) as caught:
        compose_config([override], catalogue=catalogue)
    assert REFUSED[override] in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2
