"""What all commands share: flags, overrides and the model among the words of a command line."""

from __future__ import annotations

import argparse
import logging
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from tokenyard.errors import PluginError, UserError
from tokenyard.launch.compose import ComposedConfig, compose_config, load_engine_config, load_plugins_for
from tokenyard.launch.flags import Flagged, add_engine_flags, flags_to_overrides, quote_override, refuse_unknown_flags
from tokenyard.launch.schema import TOP_KEYS

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig

_OVERRIDE = re.compile(r"([+~]{0,2})([A-Za-z_]\w*)[\w.@$]*=")
_LOG_LEVELS = ("debug", "info", "warning", "error")


@contextmanager
def one_line_errors() -> Iterator[None]:
    """Warnings about broken plugins wait until it is known that the error is not about one of them."""
    held: list[logging.LogRecord] = []

    def hold(record: logging.LogRecord) -> bool:
        held.append(record)
        return False

    source = logging.getLogger("tokenyard.plugins")
    source.addFilter(hold)
    is_told = False
    try:
        with redirect_stdout(sys.stderr):  # what a plugin prints when it is imported is no part of the output
            yield
    except PluginError:
        is_told = True
        raise
    finally:
        source.removeFilter(hold)
        for record in [] if is_told else held:
            source.handle(record)


class Parser(argparse.ArgumentParser):
    """Wrong usage is a UserError - one line - instead of a page of usage."""

    model_at: int | None = None  # which of the words, from 0, is the model; None = the command takes none
    is_server: bool = False  # whether it takes the flags of the server
    own_group: str | None = None  # keys of this group are the command's own, and no part of the engine's config

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message}; see `{self.prog} --help`")


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A parsed command line."""

    flags: argparse.Namespace
    words: Sequence[str]  # what is neither a flag nor an override
    overrides: Sequence[str | Flagged]
    config_file: Path | None
    own_overrides: Sequence[str] = ()  # of the parser's `own_group`

    def load(self) -> tuple[EngineConfig, Catalogue]:
        """The engine's config and the plugins."""
        with one_line_errors():
            return load_engine_config(self.overrides, config_file=self.config_file)

    def refuse_words(self) -> None:
        """Raise UserError for a word, of a command that takes none."""
        if self.words:
            raise UserError(f"unexpected argument '{self.words[0]}'; overrides are written key=value")

    def load_plugins(self) -> Catalogue:
        """The plugins alone, when the config cannot be had."""
        with one_line_errors():
            return load_plugins_for(self.overrides, config_file=self.config_file)

    def compose(self) -> ComposedConfig:
        """The config with the origin of each value."""
        with one_line_errors():
            return compose_config(self.overrides, config_file=self.config_file)


def make_parser(command: str, usage: str, description: str, *, model_at: int | None = None) -> Parser:
    """A parser with the flags that every command takes; `parse` adds those of the engine."""
    parser = Parser(prog=f"tokenyard {command}", usage=f"tokenyard {command} {usage}", description=description)
    parser.model_at = model_at
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--log-level", choices=_LOG_LEVELS, default="warning", help="what is logged to stderr")
    return parser


def _is_override(word: str, *, is_own: bool) -> bool:
    """A command's own words come first: a prompt may well contain "=", unless one of our keys stands before it."""
    match = _OVERRIDE.match(word)
    if match is None:
        return False
    if match[2] in TOP_KEYS:
        return not is_own or not any(character.isspace() for character in word)
    return not is_own and not _exists(word)  # the folder of a model may be named epoch=3


def _exists(word: str) -> bool:
    try:
        return Path(word).exists()
    except OSError:  # too long to be a path
        return False


def tell_progress(*loggers: str) -> None:
    """What a start does, such as fetching a model, is told on stderr; not to those who asked for errors alone."""
    if logging.getLogger().level <= logging.WARNING:
        for name in loggers:
            logging.getLogger(name).setLevel(logging.INFO)


def parse(parser: Parser, arguments: Sequence[str]) -> Given:
    """Parse flags, words and overrides in any order; the word at the parser's `model_at` is the model."""
    add_engine_flags(parser, is_server=parser.is_server)
    flags, unknown = parser.parse_known_intermixed_args(list(arguments))
    refuse_unknown_flags(unknown, parser)
    logging.getLogger().setLevel(flags.log_level.upper())
    logging.getLogger("hydra").setLevel(logging.WARNING)  # its debugging tells nothing of ours
    overrides: list[str | Flagged] = []
    own_overrides: list[str] = []
    words: list[str] = []
    model_at = parser.model_at
    for word in flags.words:
        if parser.own_group is not None and re.match(rf"{parser.own_group}\.[^=]*=", word):
            own_overrides.append(word)
        elif _is_override(word, is_own=model_at is not None and len(words) < model_at):
            overrides.append(word)
        else:
            words.append(word)
    if model_at is not None and len(words) > model_at:
        overrides.insert(0, Flagged(quote_override("model.name", words.pop(model_at)), "MODEL"))
    if model_at is not None and len(words) > model_at:
        raise UserError(f"unexpected argument '{words[model_at]}'; overrides are written key=value")
    if flags.config_file == "":
        raise UserError("--config needs a file; it was given an empty text")
    config_file = Path(flags.config_file) if flags.config_file is not None else None
    overrides = [*flags_to_overrides(flags), *overrides]
    return Given(
        flags=flags, words=words, overrides=overrides, config_file=config_file, own_overrides=tuple(own_overrides)
    )
