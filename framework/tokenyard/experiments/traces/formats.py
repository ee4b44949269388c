"""The formats by name, and which one a file has."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.errors import ConfigError, did_you_mean
from tokenyard.experiments.traces.azure import AzureReader
from tokenyard.experiments.traces.burstgpt import BurstGPTReader
from tokenyard.experiments.traces.json_rows import json_object
from tokenyard.experiments.traces.jsonl import JSONLReader
from tokenyard.experiments.traces.lines import TraceLines, shown
from tokenyard.experiments.traces.mooncake import MooncakeReader
from tokenyard.experiments.traces.servegen_files import TRACE_FILE

if TYPE_CHECKING:
    from tokenyard.experiments.traces.reader import TraceReader

SERVEGEN = "servegen"
READERS: Mapping[str, type[TraceReader]] = {
    "azure": AzureReader,
    "mooncake": MooncakeReader,
    "burstgpt": BurstGPTReader,
    "jsonl": JSONLReader,
}
FORMATS = (*READERS, SERVEGEN)


def checked_format(name: str) -> str:
    """Raises ConfigError for an unknown one."""
    if name not in FORMATS:
        raise ConfigError(
            f"workload.format={name}: unknown format{did_you_mean(name, FORMATS)}; there is: {', '.join(FORMATS)}"
        )
    return name


def find_format(path: Path) -> str:
    """What the first line says, or the name. Raises ConfigError where neither does."""
    if path.is_dir() or TRACE_FILE.fullmatch(path.name):
        return SERVEGEN
    lines = TraceLines(path)
    first = next(iter(lines), None)
    if first is None:
        raise ConfigError(f"{path}: the file is empty; a trace has at least one request")
    lines.row = 1
    if first.lstrip().startswith("{"):
        columns = set(json_object(lines, first))
        candidates = ("mooncake", "jsonl")
    else:
        columns = _header(lines, first)
        candidates = ("azure", "burstgpt")
    known = {name: len(columns.intersection(READERS[name].columns)) for name in candidates}
    best = max(candidates, key=lambda name: known[name])
    if not known[best]:
        raise ConfigError(
            f"{path}: unknown format: row 1 (line {lines.number}) is {shown(first)}, which has the columns of none; "
            f"say which one it is with workload.format: {', '.join(FORMATS)}"
        )
    return best


def _header(lines: TraceLines, first: str) -> set[str]:
    try:
        return {name.strip() for name in next(csv.reader([first]), [])}
    except csv.Error as error:  # lines that end as they did on old Macintoshes are one, to us
        lines.malformed(f"is not CSV: {error}")
