"""The runs below a folder: found, read one after the other, and counted once each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from tokenyard.errors import UserError
from tokenyard.experiments.report.axes import COMMIT, CONFIG, Configured, parse_overrides
from tokenyard.experiments.report.digest import Digest, digest
from tokenyard.experiments.run_folder import HYDRA, REQUESTS, RESULT, StoredRun, is_done, read_run

_HASH_LENGTH = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A finished run."""

    folder: Path
    configured: Configured
    metrics: Mapping[str, object]
    facts: Mapping[str, object]
    digest: Digest

    @property
    def seed(self) -> int:
        return self.configured.seed


@dataclass(slots=True)
class FoundRuns:
    """What was found, and what is to be told of it."""

    runs: list[Run] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def find_runs(root: Path, *, left_out: Path, on_run: Callable[[], None] = lambda: None) -> FoundRuns:
    """Read every finished run below `root`, but for what is below `left_out`.

    Raises UserError where there is none, and for a damaged one, with file and line.
    """
    if not root.is_dir():
        raise UserError(f"{root}: there is no such folder; give that of an experiment: tokenyard report DIR")
    found = FoundRuns()
    seen: dict[tuple[object, object], Path] = {}
    unfinished = []
    for folder in _run_folders(root, left_out):
        if not is_done(folder):
            unfinished.append(folder)
            continue
        run = _run(folder, read_run(folder))
        first = seen.setdefault((run.facts["config_hash"], run.facts.get("commit")), folder)
        if first != folder:
            found.notes.append(f"{folder}: the same config and seed as {first}; counted once")
        else:
            found.runs.append(run)
        on_run()
    found.notes += _unfinished_notes(unfinished)
    if not found.runs:
        told = f"; {len(unfinished)} were begun and not finished" if unfinished else ""
        raise UserError(f"{root}: there is no finished run in it{told}; make some with `tokenyard experiment`")
    found.notes += _version_notes(found.runs)
    return found


def _run_folders(root: Path, left_out: Path) -> Iterator[Path]:
    """In order of their names; numbers in them by size."""
    left_out = left_out.resolve()
    marks = {path.parent for name in (RESULT, REQUESTS) for path in root.rglob(name)}
    marks |= {path.parent for path in root.rglob(HYDRA) if path.is_dir()}
    for folder in sorted(marks, key=_by_number):
        if left_out not in (folder.resolve(), *folder.resolve().parents):
            yield folder


def _by_number(folder: Path) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else -1, part) for part in folder.parts]


def _run(folder: Path, stored: StoredRun) -> Run:
    facts = stored.facts
    seed = facts.get("seed")
    if not isinstance(seed, int) or not isinstance(facts.get("config_hash"), str):
        raise UserError(f"{folder / RESULT}: its facts lack seed and config_hash; make the run again")
    configured = Configured(overrides=parse_overrides(stored.overrides), components=_components(facts), seed=seed)
    return Run(folder=folder, configured=configured, metrics=stored.metrics, facts=facts, digest=digest(stored.record))


def _components(facts: Mapping[str, object]) -> dict[str, str]:
    """A policy counts as the scheduler, whose option names it."""
    found: dict[str, str] = {}
    listed = facts.get("components")
    for one in listed if isinstance(listed, list) else []:
        if isinstance(one, Mapping):
            found[str(one.get("kind"))] = str(one.get("name"))
    if "policy" in found:
        found["scheduler"] = found.pop("policy")
    groups = ("scheduler", "engine", "executor", "kv_cache", "latency", "workload")
    named = {group: str(facts.get(group, "")) for group in ("engine", "executor") if facts.get(group)}
    target = {"experiment.target": str(facts["target"])} if facts.get("target") else {}
    components = {group: found[group] for group in groups if group in found}
    hashes = {CONFIG: str(facts["config_hash"])[:_HASH_LENGTH], COMMIT: str(facts.get("commit"))[:_HASH_LENGTH]}
    return {**components, **named, **target, **hashes}


def _unfinished_notes(folders: list[Path]) -> Iterator[str]:
    if folders:
        named = ", ".join(str(folder) for folder in folders[:3]) + (", ..." if len(folders) > 3 else "")
        yield f"left out, not finished: {len(folders)} ({named})"


def _version_notes(runs: list[Run]) -> Iterator[str]:
    for name in ("tokenyard", "commit", "machine"):
        values = {str(run.facts.get(name)) for run in runs}
        if len(values) > 1:
            yield f"the runs differ in {name}: {', '.join(sorted(values))}"
