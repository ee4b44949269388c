"""The folder of an experiment: which runs it consists of, which of them are done, and that one process works in it."""

from __future__ import annotations

import contextlib
import fcntl
import json
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.errors import UserError
from tokenyard.experiments.config_file import write_config
from tokenyard.experiments.run_folder import forget_run, is_done, read_result, write_whole
from tokenyard.experiments.run_job import ERROR

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenyard.experiments.plan import Plan, PlannedRun

PLAN = "experiment.json"
_LOCK = ".lock"
_BASE = "experiments"


class ExperimentFolder:
    """Runs of a multirun lie in `0`, `1`, ... as Hydra's do; a single run lies in the folder itself."""

    def __init__(self, path: Path, plan: Plan) -> None:
        self.path = path
        self._plan = plan

    def of(self, run: PlannedRun) -> Path:
        """A run's own folder."""
        return self.path / str(run.number) if self._plan.is_multirun else self.path

    @contextlib.contextmanager
    def opened(self) -> Iterator[None]:
        """Make the folder, or find the same experiment in it. Raises UserError for one that holds anything else."""
        try:
            self._check()
            self.path.mkdir(parents=True, exist_ok=True)
            lock = (self.path / _LOCK).open("w")
        except OSError as error:
            raise UserError(f"{self.path}: no experiment can be kept there: {error}; give another --out") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                raise UserError(f"{self.path}: another process works in it; wait, or give another --out") from None
            write_whole(self.path / PLAN, json.dumps(self._values(), indent=2) + "\n")
            yield

    def is_done(self, run: PlannedRun) -> bool:
        """Whether the run has been finished with this very config."""
        folder = self.of(run)
        if not is_done(folder):
            return False
        facts = read_result(folder)["facts"]
        return isinstance(facts, dict) and facts.get("config_hash") == run.config_hash

    def is_stale(self, run: PlannedRun) -> bool:
        """Whether there is a result of another config: of a version with other defaults, or changed by hand."""
        return is_done(self.of(run)) and not self.is_done(run)

    def prepare(self, run: PlannedRun) -> Path:
        """A folder with the run's config and no results."""
        folder = self.of(run)
        folder.mkdir(exist_ok=True)
        self.clear(run)
        write_config(folder, run.config, run.overrides)
        return folder

    def clear(self, run: PlannedRun) -> None:
        """Nothing is left of a run that did not end."""
        forget_run(self.of(run))
        (self.of(run) / ERROR).unlink(missing_ok=True)

    def error_of(self, run: PlannedRun) -> str | None:
        """What its last try said; None where it said nothing."""
        try:
            return (self.of(run) / ERROR).read_text(encoding="utf-8").partition("\n")[0]
        except OSError:
            return None

    def _values(self) -> dict[str, object]:
        return {
            "is_multirun": self._plan.is_multirun,
            "runs": [
                {
                    "number": run.number,
                    "overrides": list(run.overrides),
                    "varying": list(run.varying),
                    "config_hash": run.config_hash,
                }
                for run in self._plan.runs
            ],
        }

    def _check(self) -> None:
        plan = self.path / PLAN
        if not plan.exists():
            if self.path.exists() and any(one.name != _LOCK for one in self.path.iterdir()):
                raise UserError(
                    f"{self.path}: the folder is not empty, and holds no experiment ({PLAN}); give another with --out"
                )
            return
        found = _stored_runs(plan)
        given = [list(run.overrides) for run in self._plan.runs]
        if found != given:
            raise UserError(
                f"{self.path}: holds another experiment, of {_told(found, given)}; give the same overrides again, or "
                "another folder with --out"
            )


def default_folder(now: datetime) -> Path:
    """As Hydra has them: by day and time; a number follows where two begin within a second."""
    base = Path(_BASE) / now.strftime("%Y-%m-%d") / now.strftime("%H-%M-%S")
    numbered = (base.with_name(f"{base.name}-{number}") for number in range(2, 10_000))
    return base if not base.exists() else next(one for one in numbered if not one.exists())


def _stored_runs(plan: Path) -> list[list[str]]:
    try:
        return [list(run["overrides"]) for run in json.loads(plan.read_text(encoding="utf-8"))["runs"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{plan}: is no plan of an experiment: {error!r}; give another folder with --out") from error


def _told(found: Sequence[Sequence[str]], given: Sequence[Sequence[str]]) -> str:
    """The first thing that differs."""
    for there, here in zip(found, given, strict=False):
        if there != here:
            ours = [one for one in there if one not in here] or there
            return f"{len(found)} runs, one with {' '.join(ours) or 'no overrides'}"
    return f"{len(found)} runs, not {len(given)}"
