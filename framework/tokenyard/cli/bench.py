"""`tokenyard bench KIND [MODEL] [bench.KEY=VALUE] [overrides]`: what engines and their parts cost."""

from __future__ import annotations

from collections.abc import Sequence

from tokenyard.bench.settings import GROUP
from tokenyard.cli.arguments import Given, Parser, make_parser, parse
from tokenyard.cli.bench_flags import add_bench_flags, with_bench_flags
from tokenyard.cli.bench_kinds import KINDS
from tokenyard.errors import UserError, did_you_mean

_PLANNED = ("serve",)


def command_parser() -> Parser:
    """The command's own flags."""
    description = (
        "Measure a whole engine with its model: tokens a second (`throughput`), the seconds of a batch (`latency`), "
        "the seconds from the start of a process to its first token (`startup`); or its parts: the scheduler and the "
        "K/V manager without a model (`scheduler`), what each part of a step costs (`overhead`), attention backends "
        "alone (`attention`)."
    )
    usage = f"{{{','.join(KINDS)}}} [MODEL] [--json] [bench.KEY=VALUE] [overrides]"
    parser = make_parser("bench", usage, description, model_at=1)
    parser.own_group = GROUP
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    add_bench_flags(parser)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Figures go to stdout, everything else to stderr."""
    given = parse(command_parser(), arguments)
    kind = _kind(given)
    KINDS[kind](with_bench_flags(given, kind))
    return 0


def _kind(given: Given) -> str:
    there = f"there is: {', '.join(KINDS)}"
    if not given.words:
        raise UserError(f"what to measure is missing: tokenyard bench KIND; {there}; planned: {', '.join(_PLANNED)}")
    kind = given.words[0]
    if kind in _PLANNED:
        raise UserError(f"`tokenyard bench {kind}` is not available in this version; {there}")
    if kind not in KINDS:
        raise UserError(f"unknown benchmark '{kind}'{did_you_mean(kind, KINDS)}; {there}")
    return kind
