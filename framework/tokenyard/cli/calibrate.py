"""`tokenyard calibrate [MODEL] [--to FILE] [overrides]`: how long steps take here, as a file for simulations."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.cli.arguments import Parser, make_parser, parse
from tokenyard.cli.terminal import say
from tokenyard.errors import ConfigError, UserError
from tokenyard.launch.overrides import quote_override

if TYPE_CHECKING:
    from tokenyard.cli.arguments import Given
    from tokenyard.latency_fit import Errors, FitFile

_LEAST, _MOST = 1.0, 3600.0  # seconds
DEFAULT_FILE = "latency.json"


def command_parser() -> Parser:
    """The command's own flags."""
    parser = make_parser(
        "calibrate",
        "[MODEL] [--to FILE] [--seconds N] [--json] [overrides]",
        "Run a short load on a model, fit how long its steps take, and write that to a file for simulations: "
        "latency=fitted latency.path=FILE.",
        model_at=0,
    )
    parser.add_argument("--to", default=DEFAULT_FILE, metavar="FILE", help="what is written (%(default)s)")
    parser.add_argument("--seconds", type=float, default=45.0, help="how long the load runs, about (%(default)s)")
    parser.add_argument("--json", action="store_true", help="print the file's content as one line of JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    """The errors go to stdout, everything else to stderr."""
    given = parse(command_parser(), arguments)
    seconds, path = given.flags.seconds, Path(given.flags.to)
    if not _LEAST <= seconds <= _MOST:
        raise UserError(f"--seconds takes {_LEAST:g} to {_MOST:g}; got {seconds:g}")
    _check_target(path)
    config, catalogue = given.load()

    import msgspec

    from tokenyard.experiments.calibrate import calibrate  # loads torch: not for those who ask for help
    from tokenyard.latency_fit import write_fit

    file = calibrate(config, catalogue, seconds=seconds, on_progress=say)
    write_fit(path, file)
    if given.flags.json:
        print(json.dumps({"path": str(path), **msgspec.to_builtins(file)}))
    else:
        print(_told(file, path, given))
    return 0


def _check_target(path: Path) -> None:
    """Before the time is spent: a file of somebody else's is never overwritten."""
    from tokenyard.latency_fit import read_fit

    if not path.parent.is_dir():
        raise UserError(f"--to {path}: there is no folder {path.parent}; make it, or name another one")
    if path.exists():
        try:
            read_fit(str(path))
        except ConfigError as error:
            raise UserError(f"--to {path}: there is something else; name another file, or remove it") from error


def _told(file: FitFile, path: Path, given: Given) -> str:
    return "\n".join(
        [
            f"in-sample: {_errors(file.in_sample)}",
            f"held-out:  {_errors(file.held_out)}",
            f"use it with: {shlex.join(_use(path, given))}",
        ]
    )


def _use(path: Path, given: Given) -> list[str]:
    """The settings that were measured, simulated: with others the file says little, and `latency=fitted` warns."""
    overrides = (one if isinstance(one, str) else one.override for one in given.overrides)
    config = [] if given.config_file is None else ["--config", str(given.config_file)]
    return [*config, *overrides, "executor=simulated", "latency=fitted", quote_override("latency.path", str(path))]


def _errors(errors: Errors) -> str:
    return (
        f"a step is off by {errors.mean:.1%} on average, {errors.median:.1%} in the median; all {errors.num_steps} "
        f"together by {errors.total:+.1%}"
    )
