"""`tokenyard new-plugin NAME --kind KIND [--path DIR]`: a package with a plugin that works, and tests."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

from tokenyard.cli.arguments import Parser, make_parser
from tokenyard.cli.plugin_names import PluginNames, plugin_names
from tokenyard.cli.plugin_package import KINDS, package_files, write_package
from tokenyard.errors import UserError, did_you_mean
from tokenyard.plugins import load_catalogue


def command_parser() -> Parser:
    """The command's own flags; it takes none of the engine's."""
    parser = make_parser(
        "new-plugin",
        f"NAME --kind {'|'.join(KINDS)} [--path DIR]",
        "Write an installable package in a folder NAME: a plugin that works, its options, a preset and tests.",
    )
    parser.add_argument("--kind", metavar="KIND", help=f"what the plugin provides: {', '.join(KINDS)}")
    parser.add_argument("--path", metavar="DIR", default=".", help="where the folder is made; default: here")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Writes the folder whole or not at all, and says what everything is called."""
    flags = command_parser().parse_intermixed_args(list(arguments))
    if not flags.path:
        raise UserError("--path is empty; name the folder in which the package is to be made, or leave it out for here")
    logging.getLogger().setLevel(flags.log_level.upper())
    names = plugin_names(_name(flags.words))
    kind = _kind(flags.kind)
    names.refuse_taken(load_catalogue(), KINDS[kind].name_spaces)
    folder = write_package(Path(flags.path), names.distribution, package_files(kind, names))
    print(_told(kind, names, folder))
    return 0


def _name(words: Sequence[str]) -> str:
    if not words:
        raise UserError("give the package a name: tokenyard new-plugin NAME --kind KIND; see `--help`")
    if len(words) > 1:
        raise UserError(f"unexpected argument '{words[1]}'; new-plugin takes one name, and no overrides")
    return words[0]


def _kind(given: str | None) -> str:
    listing = ", ".join(KINDS)
    if given is None:
        raise UserError(f"say what the plugin provides: --kind KIND; there is: {listing}")
    if given not in KINDS:
        raise UserError(f"unknown kind '{given}'{did_you_mean(given, KINDS)}; there is: {listing}")
    return given


def _told(kind: str, names: PluginNames, folder: Path) -> str:
    place = shlex.quote(str(folder))
    return (
        f"written: {folder}\n"
        f"  distribution {names.distribution}, module {names.module}, chosen by {KINDS[kind].group}={names.plugin}\n"
        f"next: cd {place} && pip install -e '.[dev]' && pytest"
    )
