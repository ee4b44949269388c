"""Commands and flags, from the parsers themselves."""

from __future__ import annotations

import argparse
import importlib
import textwrap
from collections.abc import Iterator

from tokenyard.cli import _COMMANDS
from tokenyard.cli.arguments import Parser, make_parser
from tokenyard.cli.bench import command_parser as bench_parser
from tokenyard.launch.flags import _FLAGS, _ONLY_VALUES, _UNAVAILABLE, add_engine_flags
from tokenyard.launch.server_flags import SERVER_FLAGS

from reference_sections.markdown import WIDTH, code, joined, table, word_list

_KEYS = {flag.name: flag.key for flag in _FLAGS}


def command_parser(name: str) -> Parser:
    """The parser of a command with its own flags only."""
    parser: Parser = importlib.import_module(f"tokenyard.cli.{name.replace('-', '_')}").command_parser()
    return parser


def commands() -> str:
    """Each command: usage, what it does, its own flags."""
    return joined(_command(name, parser) for name, parser in _parsers())


def _parsers() -> Iterator[tuple[str, Parser]]:
    for name in _COMMANDS:
        yield name, command_parser(name)
        if name == "bench":
            yield "bench serve", bench_parser("serve")


def _command(name: str, parser: Parser) -> str:
    common = set(_options(make_parser(name, "", "")))
    rows = [_flag_row(action) for action in visible_flags(parser) if not common.intersection(action.option_strings)]
    return joined(
        [
            f"### {name}",
            f"    {parser.usage}",
            (parser.description or "").partition("\n\n")[0],  # keys have a table of their own
            table(("flag", "meaning"), rows) if rows else "",
            "And [those of the server](#flags-of-serve)." if parser.is_server else "",
        ]
    )


def _options(parser: argparse.ArgumentParser) -> Iterator[str]:
    for action in parser._actions:
        yield from action.option_strings


def visible_flags(parser: argparse.ArgumentParser) -> list[argparse.Action]:
    """The flags that `--help` shows."""
    return [action for action in parser._actions if action.option_strings and action.help is not argparse.SUPPRESS]


def _flag_row(action: argparse.Action) -> tuple[str, str]:
    written = " or ".join(code(f"{option} {_metavar(action)}".rstrip()) for option in action.option_strings)
    return written, (action.help or "") % {"default": action.default}


def _metavar(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    return "{" + ",".join(map(str, action.choices)) + "}" if action.choices else ""


def engine_flags() -> str:
    """The flags of every command, and the key that each one sets."""
    parser = make_parser("COMMAND", "", "")
    add_engine_flags(parser)
    rows = []
    for action in visible_flags(parser):
        written, about = _flag_row(action)
        rows.append((written, code(_KEYS.get(action.option_strings[0], "")), about))
    return table(("flag", "sets", "meaning"), rows)


def server_flags() -> str:
    """The flags that `serve` takes besides, and the key that each one sets."""
    parser, others = make_parser("serve", "", ""), make_parser("COMMAND", "", "")
    add_engine_flags(parser, is_server=True)
    add_engine_flags(others)
    common = {option for action in visible_flags(others) for option in action.option_strings}
    keys = {flag.name: flag.key for flag in SERVER_FLAGS}
    rows = []
    for action in visible_flags(parser):
        if not common.intersection(action.option_strings):
            written, about = _flag_row(action)
            rows.append((written, code(keys.get(action.option_strings[0], "")), about))
    return table(("flag", "sets", "meaning"), rows)


def refused_flags() -> str:
    """vLLM's flags that this version does not have."""
    flags = ", ".join(
        f"{' / '.join(map(code, spellings))} with {code(only)}" for spellings, only in _ONLY_VALUES.items()
    )
    only_one = textwrap.fill(f"Accepted with one value only: {flags}.", WIDTH, break_on_hyphens=False)
    return joined([only_one, "Refused by name:", word_list(_UNAVAILABLE)])
