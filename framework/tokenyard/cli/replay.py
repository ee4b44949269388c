"""`tokenyard replay TRACE [overrides]` and `tokenyard replay --diff A B`: a trace once more, or against another one."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.cli.arguments import Parser, make_parser, parse
from tokenyard.cli.terminal import say
from tokenyard.errors import UserError

if TYPE_CHECKING:
    from tokenyard.cli.arguments import Given
    from tokenyard.replay.run import ReplayResult
    from tokenyard.trace.difference import Difference


def command_parser() -> Parser:
    """The command's own flags."""
    parser = make_parser(
        "replay",
        "TRACE [--json] [overrides] | --diff TRACE TRACE [--json]",
        "Make the decisions of a recorded trace again and compare; or compare two traces. Exit code 1: they differ.",
    )
    parser.add_argument("--diff", action="store_true", help="compare two traces with each other")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    """0 = identical, 1 = something differs."""
    given = parse(command_parser(), arguments)
    if given.config_file is not None:
        raise UserError("replay takes its config from the trace; leave out --config")
    return _diff(given) if given.flags.diff else _replay(given)


def _replay(given: Given) -> int:
    from tokenyard.replay.run import replay

    if len(given.words) != 1:
        raise UserError(f"replay takes one trace, got {len(given.words)}; two are compared with --diff")
    overrides = [override if isinstance(override, str) else override.override for override in given.overrides]
    result = replay(Path(given.words[0]), overrides)
    _tell_notes(result.notes)
    if given.flags.json:
        print(json.dumps(_replay_values(result, given.words[0], overrides)))
    elif result.difference is None:
        print(f"{result.num_steps} steps, {'the same decisions' if overrides else 'identical'}")
    else:
        print(_told(result.difference, "recorded", "with the overrides" if overrides else "replayed"))
    if result.shadow is not None and not given.flags.json:
        print(result.shadow)
    return 0 if result.difference is None else 1


def _replay_values(result: ReplayResult, trace: str, overrides: Sequence[str]) -> dict[str, object]:
    shadow = result.shadow
    points = () if shadow is None else shadow.points
    return {
        "trace": trace,
        "overrides": list(overrides),
        "steps": result.num_steps,
        "records": result.num_records,
        "identical": result.difference is None,
        "difference": None if result.difference is None else result.difference.values(),
        "shadow": None if shadow is None else {"policy": shadow.policy, "points": [one._asdict() for one in points]},
        "notes": list(result.notes),
    }


def _diff(given: Given) -> int:
    from tokenyard.trace.diff import diff

    if len(given.words) != 2 or given.overrides:
        raise UserError("replay --diff takes two traces and nothing else: tokenyard replay --diff A.jsonl B.jsonl")
    result = diff(*(Path(word) for word in given.words))
    _tell_notes(result.notes)
    is_identical = result.difference is None  # the decisions are: a config may differ in what changes none
    if given.flags.json:
        found = {
            "traces": list(given.words),
            "steps": result.num_steps,
            "identical": is_identical,
            "config": [{"key": key, "left": ours, "right": theirs} for key, ours, theirs in result.config],
            "difference": None if result.difference is None else result.difference.values(),
            "notes": list(result.notes),
        }
        print(json.dumps(found))
        return 0 if is_identical else 1
    for key, ours, theirs in result.config:
        print(f"config: {key}: {json.dumps(ours)} in the first, {json.dumps(theirs)} in the second")
    if result.difference is None:
        print(f"{result.num_steps} steps, identical{' in spite of that' if result.config else ''}")
    else:
        print(_told(result.difference, "in the first", "in the second"))
    return 0 if is_identical else 1


def _tell_notes(notes: Sequence[str]) -> None:
    for note in notes:
        say(f"note: {note}")


def _told(difference: Difference, left: str, right: str) -> str:
    where = "before the first step" if difference.step is None else f"step {difference.step}"
    return (
        f"{where} differs ({difference.kind}, record {difference.record}): {difference.what}\n"
        f"  {left}: {difference.left}\n"
        f"  {right}: {difference.right}"
    )
