"""The runs of an experiment by one of Hydra's launchers, which may start them in other processes or on other machines.

Those share the experiment's folder with this one. Each run still has a process of its own, so that the launcher's
workers outlive a crash.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.experiments.multirun import outcome_of, skipped
from tokenyard.experiments.run_folder import is_done, write_whole
from tokenyard.experiments.run_job import ERROR, MODULE
from tokenyard.ipc.processes import ChildProcess
from tokenyard.launch.hydra_jobs import run_by_launcher

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenyard.experiments.experiment_folder import ExperimentFolder
    from tokenyard.experiments.multirun import Outcome
    from tokenyard.experiments.plan import Plan, PlannedRun

_POLL = 0.5  # seconds between two looks at the folders


def run_launched(
    plan: Plan, folder: ExperimentFolder, launcher: Sequence[str], tell: Callable[[Outcome], None]
) -> list[Outcome]:
    """As `run_all`; how many run at a time is the launcher's matter. Raises ConfigError as `run_by_launcher` does."""
    outcomes = skipped(plan, folder)
    for outcome in outcomes:
        tell(outcome)
    done = {outcome.run.number for outcome in outcomes}
    pending = [run for run in plan.runs if run.number not in done]
    if not pending:
        return outcomes
    task = FolderTask([str(folder.prepare(run).absolute()) for run in pending])
    watch = _Watch(pending, folder, tell)
    try:
        run_by_launcher(launcher, folder.path.absolute(), len(pending), task)
    finally:
        outcomes += watch.finish()
        for outcome in outcomes:
            if outcome.status == "failed" and folder.error_of(outcome.run) is None:
                folder.clear(outcome.run)
    return sorted(outcomes, key=lambda outcome: outcome.run.number)


class FolderTask:
    """What the launcher's workers call: makes the run of one of these folders. It travels between processes."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = tuple(folders)

    def __call__(self, index: int) -> None:
        folder = Path(self.folders[index])
        child = ChildProcess(MODULE, f"run-{folder.name}", arguments=[str(folder)])
        try:
            end = child.wait()
        finally:
            child.stop(grace=0)
            child.close()
        if not is_done(folder) and not (folder / ERROR).exists():
            write_whole(folder / ERROR, f"its process {end}\n")


class _Watch:
    """Tells of runs whose folders say that they have ended, while the launcher does not come back."""

    def __init__(self, runs: Sequence[PlannedRun], folder: ExperimentFolder, tell: Callable[[Outcome], None]) -> None:
        self._open = list(runs)
        self._folder = folder
        self._tell = tell
        self._outcomes: list[Outcome] = []
        self._began = time.monotonic()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="tokenyard-experiment-watch", daemon=True)
        self._thread.start()

    def finish(self) -> list[Outcome]:
        """The launcher is back: what has not ended failed."""
        self._over.set()
        self._thread.join()
        self._look(is_last=True)
        return self._outcomes

    def _watch(self) -> None:
        while not self._over.wait(_POLL):
            self._look(is_last=False)

    def _look(self, *, is_last: bool) -> None:
        for run in list(self._open):
            if is_last or self._folder.is_done(run) or self._folder.error_of(run) is not None:
                seconds = time.monotonic() - self._began
                outcome = outcome_of(run, self._folder, "ended without a word", seconds)
                self._open.remove(run)
                self._outcomes.append(outcome)
                self._tell(outcome)
