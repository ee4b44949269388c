"""`tokenyard simulate [overrides]`: a workload in virtual time, and what came of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.cli.arguments import Parser, make_parser, parse
from tokenyard.errors import UserError
from tokenyard.launch.flags import Flagged

if TYPE_CHECKING:
    from tokenyard.cli.arguments import Given
    from tokenyard.experiments.simulate import SimulationResult


def command_parser() -> Parser:
    """The command's own flags."""
    parser = make_parser(
        "simulate",
        "[--json] [--requests FILE] [--steps FILE] [overrides]",
        "Run a workload on the real scheduler, policy and K/V manager in virtual time, without a model: "
        "tokenyard simulate workload=azure_conv latency=linear latency.per_step=0.005 latency.per_token=1e-5.",
    )
    parser.add_argument("--json", action="store_true", help="print the metrics as one line of JSON, last")
    parser.add_argument("--requests", metavar="FILE", help="write a CSV with a row for each request")
    parser.add_argument("--steps", metavar="FILE", help="write a CSV with a row for each step")
    return parser


def main(arguments: Sequence[str]) -> int:
    """Metrics go to stdout, everything else to stderr."""
    given = parse(command_parser(), arguments)
    given.refuse_words()
    _check_file(given, "requests")
    _check_file(given, "steps")
    # A default of this command's: what is given wins.
    given = replace(given, overrides=[Flagged("executor=simulated", "simulate"), *given.overrides])
    result = _simulate(given)
    if given.flags.json:
        print(json.dumps({**result.metrics, "facts": result.facts}))
        return 0
    from tokenyard.experiments.summary import told_run

    print(told_run(result.metrics, result.facts))
    return 0


def _simulate(given: Given) -> SimulationResult:
    config, catalogue = given.load()
    from tokenyard.experiments.records import REQUEST_COLUMNS
    from tokenyard.experiments.run_tables import write_request_table, write_steps
    from tokenyard.experiments.simulate import simulated

    result = simulated(config, catalogue, keep_steps=given.flags.steps is not None)
    if given.flags.requests is not None:
        write_request_table(result.record.requests, Path(given.flags.requests), REQUEST_COLUMNS)
    if given.flags.steps is not None and result.record.steps is not None:
        write_steps(result.record.steps, Path(given.flags.steps))
    return result


def _check_file(given: Given, name: str) -> None:
    """A long run should not end at a folder that is not there."""
    path = getattr(given.flags, name)
    if path is None:
        return
    if not path or Path(path).is_dir() or not Path(path).absolute().parent.is_dir():
        raise UserError(f"--{name}: '{path}' is no file in a folder that exists; give another path")
