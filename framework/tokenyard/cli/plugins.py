"""`tokenyard plugins [explain NAME] [overrides]`: what is installed, what runs, what does not and why."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokenyard.cli.arguments import Parser, make_parser, parse
from tokenyard.cli.terminal import say
from tokenyard.errors import PluginError, UserError
from tokenyard.interfaces import eviction, latency, logits_processor, predictor
from tokenyard.platform import Platform
from tokenyard.plugin_report import PluginRow, describe, explain
from tokenyard.worker.attention_choice import AUTO, KIND, auto_walk

if TYPE_CHECKING:
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig, SchedulerConfig


def command_parser() -> Parser:
    """The command's own flags."""
    parser = make_parser("plugins", "[explain NAME] [--json] [overrides]", "List plugins, or explain one by name.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def main(arguments: Sequence[str]) -> int:
    """A table, or JSON."""
    given = parse(command_parser(), arguments)
    if given.words and (given.words[0] != "explain" or len(given.words) != 2):
        raise UserError(f"unexpected arguments {' '.join(given.words)!r}; write `plugins` or `plugins explain NAME`")
    try:
        config, catalogue = given.load()
        active = active_components(config, catalogue)
    except PluginError as error:
        # This command is where one looks for the reason: it must work when nothing else does.
        catalogue, active = given.load_plugins(), set()
        say(f"error: {error}")
    if given.words:
        _explain(given.words[1], catalogue, active, is_json=given.flags.json)
        return 0
    rows = describe(catalogue, Platform(), active)
    if given.flags.json:
        print(json.dumps([row.to_json() for row in rows]))
    else:
        _print_table(rows)
    return 0


def active_components(config: EngineConfig, catalogue: Catalogue) -> set[tuple[str, str]]:
    """(kind, name) of what a config chooses; of `attention=auto` the backend that it would try first."""
    active = {
        ("engine", config.engine.name),
        ("scheduler", config.scheduler.name),
        ("kv_cache", config.kv_cache.name),
        ("attention", config.attention.name),
        ("executor", config.executor.name),
        (latency.COMPONENT_KIND, config.latency.name),
        (predictor.COMPONENT_KIND, config.scheduler.predictor),
        (eviction.COMPONENT_KIND, config.kv_cache.eviction),
    }
    active.update(("observer", observer.name) for observer in config.observers)
    active.update((logits_processor.COMPONENT_KIND, processor.name) for processor in config.logits_processors)
    active.update(("policy", policy) for policy in _policies(config.scheduler))
    if config.attention.name == AUTO:
        platform = Platform()
        tried = [entry for entry in auto_walk(catalogue) if not entry.unavailable_reasons(platform)]
        active.update(("attention", entry.name) for entry in tried[:1])
    return active


def _policies(scheduler: SchedulerConfig) -> Iterator[str]:
    """The one that acts, and the one that is asked beside it."""
    if scheduler.policy is not None:
        yield scheduler.policy.name
    if scheduler.shadow is not None:
        yield scheduler.shadow


def _explain(name: str, catalogue: Catalogue, active: set[tuple[str, str]], *, is_json: bool) -> None:
    """A name; also `auto`, which is none of a plugin's unless one takes it."""
    if name == AUTO and all(entry.name != AUTO for entry in catalogue.entries()):
        walk = [entry.name for entry in auto_walk(catalogue)]
        print(json.dumps({"name": AUTO, "verdicts": [], "walk": walk}) if is_json else _auto_text(walk))
        return
    explanation = explain(catalogue, name, Platform(), active)
    print(json.dumps(explanation.to_json()) if is_json else explanation)


def _auto_text(names: Sequence[str]) -> str:
    return (
        f"{KIND}={AUTO} is no plugin: it takes the first backend that runs here and serves the model, in this order: "
        f"{', '.join(names) or 'none is installed'}"
    )


def _print_table(rows: Sequence[PluginRow]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(file=sys.stdout, soft_wrap=False)
    if not console.is_terminal:
        console.width = 160  # a pipe has no width of its own, and wrapped rows cannot be searched
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("KIND", "NAME", "STATUS", "DISTRIBUTION", "API", "SUMMARY"):
        table.add_column(title, overflow="fold", no_wrap=title in ("KIND", "NAME", "STATUS"))
    for row in rows:
        about = row.reason or row.summary
        table.add_row(
            # Text, not markup: what a plugin says of itself may contain brackets.
            *map(
                Text,
                (
                    row.kind or "?",
                    row.name,
                    row.status,
                    f"{row.distribution} {row.version}",
                    row.api_version or "?",
                    about,
                ),
            )
        )
    console.print(table)
