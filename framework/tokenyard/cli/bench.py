"""`tokenyard bench KIND [MODEL] [bench.KEY=VALUE] [overrides]`: what engines and their parts cost."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping, Sequence

from tokenyard.bench.keys import GROUP
from tokenyard.cli.arguments import Given, Parser, make_parser, parse
from tokenyard.cli.bench_flags import add_bench_flags, keys_text, with_bench_flags
from tokenyard.cli.bench_kinds import KINDS
from tokenyard.cli.bench_serve import add_result_flags
from tokenyard.cli.bench_serve_flags import add_serve_flags, parse_serve
from tokenyard.errors import UserError, did_you_mean

_ABOUT: Mapping[str, str] = {
    "throughput": "Measure output tokens a second of a whole engine with its model.",
    "latency": "Measure the seconds that a whole engine takes for a batch.",
    "startup": "Measure the seconds from the start of a process to its first token.",
    "scheduler": "Measure the scheduler and the K/V manager without a model.",
    "overhead": "Measure what each part of a step costs.",
    "attention": "Measure attention backends alone, beside each other and beside the speed of the memory.",
    "serve": "Measure a server of OpenAI's API that runs already, from its client's side.",
}
_WITHOUT_MODEL = ("scheduler", "attention")
_SERVE = "serve"  # has flags of its own, and none of an engine
_HELP_WIDTH = 100


def command_parser(kind: str | None = None) -> Parser:
    """The command's own flags: of all kinds, or of one with its keys in the description."""
    words = "{" + ",".join(KINDS) + "}" if kind is None else kind
    model = "" if kind in _WITHOUT_MODEL else "[MODEL] "
    overrides = "" if kind == _SERVE else " [overrides]"
    parser = make_parser(
        "bench", f"{words} {model}[--json] [bench.KEY=VALUE]{overrides}", _description(kind), model_at=1
    )
    if kind is not None:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter  # a line for each key
    parser.own_group = GROUP
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    if kind == _SERVE:
        add_serve_flags(parser)
        add_result_flags(parser)
    else:
        add_bench_flags(parser, kind)
    return parser


def _description(kind: str | None) -> str:
    if kind is not None:
        return f"{textwrap.fill(_ABOUT[kind], _HELP_WIDTH)}\n\n{keys_text(kind, _HELP_WIDTH)}"
    return (
        "Measure a whole engine with its model: tokens a second (`throughput`), the seconds of a batch (`latency`), "
        "the seconds from the start of a process to its first token (`startup`); or its parts: the scheduler and the "
        "K/V manager without a model (`scheduler`), what each part of a step costs (`overhead`), attention backends "
        "alone (`attention`); or a server under load (`serve`). `tokenyard bench KIND --help` lists the keys of one."
    )


def main(arguments: Sequence[str]) -> int:
    """Figures go to stdout, everything else to stderr."""
    if _first_kind(arguments) == _SERVE:
        KINDS[_SERVE](parse_serve(command_parser(_SERVE), arguments))
        return 0
    given = parse(command_parser(_explained(arguments)), arguments)
    kind = _kind(given)
    KINDS[kind](with_bench_flags(given, kind))
    return 0


def _explained(arguments: Sequence[str]) -> str | None:
    """The kind whose help is asked for; None where none is, or that of the command."""
    if not {"-h", "--help"}.intersection(arguments):
        return None
    return _first_kind(arguments)


def _first_kind(arguments: Sequence[str]) -> str | None:
    return next((word for word in arguments if word in KINDS), None)


def _kind(given: Given) -> str:
    there = f"there is: {', '.join(KINDS)}"
    if not given.words:
        raise UserError(f"what to measure is missing: tokenyard bench KIND; {there}")
    kind = given.words[0]
    if kind not in KINDS:
        raise UserError(f"unknown benchmark '{kind}'{did_you_mean(kind, KINDS)}; {there}")
    return kind
