"""The folder of a run: what came of it, written so that a folder is either whole or known not to be."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

from tokenyard.errors import UserError
from tokenyard.experiments.records import RunRecord, RunTotals
from tokenyard.experiments.run_tables import (
    read_gaps,
    read_requests,
    read_steps,
    write_gaps,
    write_request_table,
    write_steps,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

REQUESTS, STEPS, GAPS, RESULT = "requests.csv", "steps.csv", "gaps.csv", "result.json"
HYDRA = ".hydra"
"""Where Hydra keeps what a run was started with: `config.yaml` and `overrides.yaml`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run that was read back."""

    record: RunRecord
    metrics: Mapping[str, object]
    facts: Mapping[str, object]
    overrides: Sequence[str]
    times: Mapping[str, object]  # of day, when it ran; no result depends on them


def write_run(
    folder: Path,
    record: RunRecord,
    metrics: Mapping[str, object],
    facts: Mapping[str, object],
    overrides: Sequence[str],
    *,
    times: Mapping[str, object] | None = None,
) -> None:
    """Write the tables, then `result.json` at once: a folder without it is not done. The folder is made where it lacks.

    An earlier result in it is gone first, so that it never stands beside tables of another run. Raises OSError.
    """
    folder.mkdir(parents=True, exist_ok=True)
    forget_run(folder)
    write_request_table(record.requests, folder / REQUESTS)
    write_gaps(record.gaps, folder / GAPS)
    if record.steps is not None:
        write_steps(record.steps, folder / STEPS)
    result = {
        "metrics": metrics,
        "facts": facts,
        "overrides": list(overrides),
        "totals": dataclasses.asdict(record.totals),
        "gaps_relative_error": record.gaps.relative_error,
        "times": dict(times or {}),
    }
    write_whole(folder / RESULT, json.dumps(result, indent=2, ensure_ascii=False) + "\n")


def forget_run(folder: Path) -> None:
    """No result is left in the folder: first it is not done any more, then the tables go."""
    for name in (RESULT, _part(RESULT), REQUESTS, GAPS, STEPS):
        (folder / name).unlink(missing_ok=True)


def write_whole(path: Path, text: str) -> None:
    """The file is there with all of the text, or as it was before."""
    part = path.with_name(_part(path.name))
    with part.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def _part(name: str) -> str:
    return f".{name}.part"


def is_done(folder: Path) -> bool:
    """Whether a run has been written to it to the end."""
    return (folder / RESULT).is_file()


def read_result(folder: Path) -> dict[str, object]:
    """`result.json` alone. Raises UserError for a folder without one, or with one that is none of ours."""
    path = folder / RESULT
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{folder}: no run has been finished in it: there is no {RESULT}") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: cannot be read: {error}") from error
    found = values if isinstance(values, dict) else {}
    missing = [key for key in ("metrics", "facts", "overrides", "totals") if key not in found]
    if missing:
        raise UserError(f"{path}: is no result of a run: it lacks {', '.join(missing)}")
    overrides = found["overrides"]
    if not isinstance(overrides, list) or not all(isinstance(one, str) for one in overrides):
        raise UserError(f"{path}: its overrides are no list of texts; make the run again")
    return found


def read_run(folder: Path) -> StoredRun:
    """What `write_run` wrote, exactly. Raises UserError for a folder that is not done or was changed by hand."""
    result = read_result(folder)
    facts = cast("Mapping[str, object]", result["facts"])
    steps = folder / STEPS
    record = RunRecord(
        requests=read_requests(folder / REQUESTS),
        gaps=read_gaps(folder / GAPS, cast("float", result.get("gaps_relative_error", 0.0))),
        totals=_totals(folder, result["totals"]),
        steps=read_steps(steps) if steps.is_file() else None,
        facts=facts,
    )
    return StoredRun(
        record=record,
        metrics=cast("Mapping[str, object]", result["metrics"]),
        facts=facts,
        overrides=cast("Sequence[str]", result["overrides"]),
        times=cast("Mapping[str, object]", result.get("times", {})),
    )


def _totals(folder: Path, values: object) -> RunTotals:
    try:
        return RunTotals(**cast("dict[str, None]", values))
    except TypeError as error:
        raise UserError(f"{folder / RESULT}: its totals are not those of a run: {error}") from error
