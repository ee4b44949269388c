"""`tokenyard config [overrides]`: the composed config, and where each value comes from."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from tokenyard.cli.arguments import Parser, make_parser, parse


def command_parser() -> Parser:
    """The command's own flags."""
    parser = make_parser("config", "[--json] [overrides]", "Print the composed config and the origin of each value.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    """YAML with origins as comments, or JSON: `{key: {"value": ..., "origin": ...}}`."""
    given = parse(command_parser(), arguments)
    given.refuse_words()
    composed = given.compose()
    if given.flags.json:
        leaves = dict(_leaves(composed.values))
        found = {key: {"value": value, "origin": composed.origins.get(key, "default")} for key, value in leaves.items()}
        print(json.dumps(found, indent=2))
    else:
        print("\n".join(_yaml(composed.values, composed.origins)))
    return 0


def _leaves(values: Mapping[str, object], prefix: str = "") -> list[tuple[str, object]]:
    found: list[tuple[str, object]] = []
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            found += _leaves(value, f"{prefix}{name}.")
        else:
            found.append((f"{prefix}{name}", value))
    return found


def _yaml(values: Mapping[str, object], origins: Mapping[str, str], prefix: str = "", depth: int = 0) -> list[str]:
    lines = []
    for name, value in values.items():
        key, indent = f"{prefix}{name}", "  " * depth
        if isinstance(value, Mapping) and value:
            lines.append(f"{indent}{name}:")
            lines += _yaml(value, origins, f"{key}.", depth + 1)
        else:
            # JSON scalars and lists are YAML too, and quote what needs quoting.
            text = f"{indent}{name}: {json.dumps(value, ensure_ascii=False)}"
            lines.append(f"{text:<56} # {origins.get(key, 'default')}")
    return lines
