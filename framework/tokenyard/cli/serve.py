"""`tokenyard serve [MODEL] [flags] [overrides]`: OpenAI's API over HTTP."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tokenyard.cli.arguments import Given, Parser, make_parser, parse
from tokenyard.config import ModelConfig
from tokenyard.server.api_keys import KEY_VARIABLE, read_api_keys
from tokenyard.server.run import START_THREAD, check_packages, serve

_LOG_FORMAT = "%(asctime)s %(levelname)s: %(message)s"


def command_parser() -> Parser:
    """The command's own flags."""
    parser = make_parser(
        "serve",
        "[MODEL] [flags] [overrides]",
        "Serve a model over HTTP, as OpenAI's API does. MODEL is a model's name, a folder, a .gguf file or a Hub id; "
        f"default {ModelConfig().name}. It ends with code 0 after SIGTERM or Ctrl-C.",
        model_at=0,
    )
    parser.is_server = True
    parser.set_defaults(log_level="info")
    parser.add_argument(
        "--api-key",
        action="append",
        metavar="KEY",
        dest="api_keys",
        help=f"requests need one of these; may be given several times. Others can read it: {KEY_VARIABLE} is better",
    )
    parser.add_argument("--api-key-file", metavar="FILE", help="a file with one key a line")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Until a signal, or the engine's end."""
    given = parse(command_parser(), arguments)
    given.refuse_words()
    check_packages()
    keys = _api_keys(given)
    _log_with_time()
    serve(*given.load(), api_keys=keys)
    _end_if_starting()
    return 0


def _api_keys(given: Given) -> list[str]:
    file = given.flags.api_key_file
    return read_api_keys(given.flags.api_keys or (), None if file is None else Path(file), os.environ)


def _log_with_time() -> None:
    for handler in logging.getLogger().handlers:
        handler.setFormatter(logging.Formatter(_LOG_FORMAT))


def _end_if_starting() -> None:
    """Stopped while an engine loads in this process, which nothing can interrupt: it must not hold up the end."""
    if any(thread.name == START_THREAD and thread.is_alive() for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
