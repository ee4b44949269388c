"""The command line: `tokenyard COMMAND ...`.

Exit codes of every command: 0 done; 1 something failed though nothing given was wrong; 2 something given was wrong;
3 the engine died; 130 interrupted.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from types import ModuleType

from tokenyard.cli.terminal import prepare_streams, say
from tokenyard.errors import TokenyardError, UserError, did_you_mean
from tokenyard.primitive_caches import bound_primitive_caches
from tokenyard.thread_waits import share_cores

_COMMANDS = {
    "generate": "answer one prompt",
    "chat": "talk with a model",
    "serve": "serve a model over HTTP, as OpenAI's API does",
    "plugins": "list the installed plugins; `plugins explain NAME` says why one would run here or not",
    "config": "print the composed config, with where each value comes from",
    "doctor": "check this machine, the plugins and a model",
    "bench": "measure an engine, a part of it, or a server",
    "run-batch": "answer a file of requests in OpenAI's batch format",
    "simulate": "run a workload on the scheduler in virtual time, without a model",
    "experiment": "run a workload under many configs, simulated or live, each in a process of its own",
    "report": "tables and pictures of an experiment's runs",
    "calibrate": "fit a latency model to this machine's engine",
    "fetch-trace": "download a public trace of requests",
    "replay": "make the decisions of a recorded trace again and compare them",
    "new-plugin": "write an installable package with a plugin that works and its tests",
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point of the `tokenyard` program: runs a command and exits."""
    prepare_streams()
    share_cores(os.environ)
    bound_primitive_caches(os.environ)
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    code = run(sys.argv[1:] if arguments is None else arguments, on_interrupt=ignore_interrupts)
    ignore_interrupts()
    sys.exit(code)


def ignore_interrupts() -> None:
    """The end has begun: another Ctrl-C would only tear it apart."""
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def run(arguments: Sequence[str], on_interrupt: Callable[[], None] = lambda: None) -> int:
    """Run a command; returns its exit code. Errors made on purpose are one line on stderr.

    `on_interrupt` is called first thing after Ctrl-C: whoever forwards one often sends two.
    """
    try:
        code = _dispatch(list(arguments))
        if sys.stdout is not None:
            sys.stdout.flush()  # so that what cannot be written is told here and not at exit
        return code
    except TokenyardError as error:
        say(f"error: {' '.join(str(error).splitlines())}")  # a plugin's or a library's message may have several lines
        return error.exit_code
    except KeyboardInterrupt:
        on_interrupt()
        say("interrupted")
        return 130
    except BrokenPipeError:
        _drop_stdout()
        return 0
    except OSError as error:
        _drop_stdout()
        say(f"error: {error}")
        return 1


def _drop_stdout() -> None:
    """The reader has left or the disk is full: writing what is buffered once more at exit would complain again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    name = arguments[0]
    if name in ("-V", "--version", "version"):
        from tokenyard import __version__

        print(f"tokenyard {__version__}")
        return 0
    if name.startswith("-"):
        raise UserError(f"flags come after the command: tokenyard COMMAND {name}; see `tokenyard --help`")
    if name not in _COMMANDS:
        raise UserError(f"unknown command '{name}'{did_you_mean(name, _COMMANDS)}; there is: {', '.join(_COMMANDS)}")
    command = _command(name)
    code: int = command.main(arguments[1:])
    return code


def _command(name: str) -> ModuleType:
    """Each command is a module, so that one does not wait for the imports of another."""
    return importlib.import_module(f"tokenyard.cli.{name.replace('-', '_')}")


def _help() -> str:
    lines = [f"  {name:<11} {summary}" for name, summary in _COMMANDS.items()]
    return "\n".join(
        [
            "usage: tokenyard COMMAND [arguments] [flags] [overrides]",
            "",
            *lines,
            "",
            "`tokenyard COMMAND --help` lists a command's flags; overrides are Hydra's: kv_cache.block_size=32",
            "exit codes: 0 done, 1 something failed (a request, a server, an internal error), 2 something given was",
            "wrong, 3 the engine died, 130 interrupted; Ctrl-C ends `serve` with 0",
        ]
    )
