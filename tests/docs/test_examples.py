"""What the pages tell people to type: Python compiles, YAML and TOML can be read, commands and overrides are right."""

from __future__ import annotations

import importlib
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from omegaconf import OmegaConf
from tokenyard.cli import _COMMANDS, bench
from tokenyard.cli.arguments import Given, Parser, parse
from tokenyard.cli.bench_serve_flags import parse_serve
from tokenyard.errors import ConfigError
from tokenyard.launch.compose import compose_config
from tokenyard.launch.hydra_jobs import split_hydra_overrides
from tokenyard.launch.sweep import expand_sweeps
from tokenyard.platform import Platform
from tokenyard.plugin_report import describe

ROOT = Path(__file__).resolve().parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MISTAKES = {"generate Hi scheduler.max_num_seq=4": "did you mean 'scheduler.max_num_seqs'"}
"""Commands that a page shows because they are wrong, and what the error says."""


def blocks(path: Path, language: str) -> Iterator[str]:
    """The fenced blocks of a language."""
    pattern = re.compile(rf"^( *)```{language}\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
    for match in pattern.finditer(path.read_text(encoding="utf-8")):
        yield textwrap.dedent(match[2])


def all_blocks(language: str) -> list[object]:
    return [
        pytest.param(block, id=f"{path.relative_to(ROOT)}-{number}")
        for path in PAGES
        for number, block in enumerate(blocks(path, language))
    ]


def shell_lines(path: Path) -> Iterator[str]:
    """Lines of shell blocks, and indented lines that begin with our command (but no usage such as `[MODEL]`)."""
    for block in blocks(path, "sh"):
        yield from block.replace("\\\n", " ").splitlines()
    for line in re.findall(r"^    (tokenyard [a-z].+)$", path.read_text(encoding="utf-8"), re.MULTILINE):
        if "[" not in line:
            yield line


def commands(line: str) -> Iterator[tuple[dict[str, str], list[str]]]:
    """The calls of our command in a shell line: environment variables, arguments."""
    words: list[str] = []
    for word in [*shlex.split(line, comments=True), "&&"]:
        if word != "&&":
            words.append(word)
            continue
        variables: dict[str, str] = {}
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name, _, variables[name] = words.pop(0).partition("=")
        if words and Path(words[0]).name == "tokenyard":
            yield variables, words[1:]
        words = []


COMMANDS = [
    pytest.param(variables, arguments, id=f"{path.relative_to(ROOT)}: {' '.join(arguments)}")
    for path in PAGES
    for line in shell_lines(path)
    for variables, arguments in commands(line)
]


@pytest.mark.parametrize("block", all_blocks("python"))
def test_every_python_block_compiles(block: str) -> None:
    compile(block, "<block>", "exec")


@pytest.mark.parametrize("block", all_blocks("toml"))
def test_every_toml_block_can_be_read(block: str) -> None:
    assert tomllib.loads(block)


@pytest.mark.parametrize("block", all_blocks("yaml"))
def test_every_yaml_block_can_be_read(block: str) -> None:
    assert OmegaConf.create(block)


def given(arguments: list[str]) -> Given:
    name = arguments[0]
    assert name in _COMMANDS
    if arguments[:2] == ["bench", "serve"]:  # has flags of its own
        return parse_serve(bench.command_parser("serve"), arguments[1:])
    parser: Parser = importlib.import_module(f"tokenyard.cli.{name.replace('-', '_')}").command_parser()
    if name == "experiment":  # one of its runs stands for all
        command = parse(parser, split_hydra_overrides(arguments[1:]).others)
        return replace(command, overrides=expand_sweeps(command.overrides)[0][0])
    return parse(parser, arguments[1:])


def test_there_are_commands_in_the_pages() -> None:
    assert len(COMMANDS) > 25


@pytest.mark.usefixtures("example_plugin")
@pytest.mark.parametrize(("variables", "arguments"), COMMANDS)
def test_every_command_is_understood(
    variables: dict[str, str], arguments: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if mistake := MISTAKES.get(" ".join(arguments)):
        with pytest.raises(ConfigError, match=mistake):
            given(arguments).load()
        return
    command = given(arguments)
    _, catalogue = command.load()
    if arguments[0] == "plugins" and command.words:
        assert command.words[1] in {row.name for row in describe(catalogue, Platform())}


def test_the_example_of_a_config_file_is_one(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "how-to" / "choose-a-plugin.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"`--config FILE`.*?```yaml\n(.*?)```", text, re.DOTALL)
    file = tmp_path / "my.yaml"
    file.write_text(block, encoding="utf-8")
    origins = compose_config([], config_file=file).origins
    assert {key for key, origin in origins.items() if "my.yaml" in origin} >= {
        "kv_cache.block_size",
        "model.max_model_len",
    }


@pytest.mark.parametrize("page", ["serve.md", "own-hydra-script.md"])
def test_a_hydra_script_runs_as_it_is_printed(page: str, tmp_path: Path) -> None:
    """Up to the port, which is wrong: so it has called us with its config."""
    path = ROOT / "docs" / "how-to" / page
    (script,) = (block for block in blocks(path, "python") if "@hydra.main" in block)
    (config,) = (block for block in blocks(path, "yaml") if "searchpath" in block)
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "app.yaml").write_text(config)
    (tmp_path / "launch.py").write_text(script)
    command = [sys.executable, "launch.py", "server.port=-1", "hydra.run.dir=."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode != 0
    assert "server.port must be a port from 1 to 65535" in done.stderr
