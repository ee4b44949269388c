"""The runs of an experiment, several at a time, each in a process of its own; one that crashes takes no other along."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from tokenyard.experiments.run_job import MODULE
from tokenyard.ipc.processes import ChildProcess, has_ended

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tokenyard.experiments.experiment_folder import ExperimentFolder
    from tokenyard.experiments.plan import Plan, PlannedRun
    from tokenyard.ipc.processes import ProcessEnd

_POLL = 1.0  # seconds; ends are noticed at once, this is for who waits for Ctrl-C


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended; `skipped` had been finished before."""

    run: PlannedRun
    folder: Path
    status: Literal["finished", "skipped", "failed"]
    seconds: float = 0.0
    error: str | None = None


def run_all(plan: Plan, folder: ExperimentFolder, tell: Callable[[Outcome], None]) -> list[Outcome]:
    """Make every run that is not done; the folder is open. `tell` hears of each outcome as it comes."""
    outcomes = skipped(plan, folder)
    for outcome in outcomes:
        tell(outcome)
    done = {outcome.run.number for outcome in outcomes}
    pool = _Pool(folder, tell)
    outcomes += pool.run([run for run in plan.runs if run.number not in done], num_jobs(plan))
    return sorted(outcomes, key=lambda outcome: outcome.run.number)


def skipped(plan: Plan, folder: ExperimentFolder) -> list[Outcome]:
    """Those that were finished before."""
    return [Outcome(run=run, folder=folder.of(run), status="skipped") for run in plan.runs if folder.is_done(run)]


def num_jobs(plan: Plan) -> int:
    """Runs at a time. Live ones disturb each other, so there is one unless the user says otherwise."""
    if plan.config.experiment.jobs is not None:
        return plan.config.experiment.jobs
    return num_cores() if all(run.is_simulated for run in plan.runs) else 1


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def outcome_of(run: PlannedRun, folder: ExperimentFolder, end: ProcessEnd | str | None, seconds: float) -> Outcome:
    """What came of a run whose process has ended, as its folder says; `end` is for one that said nothing."""
    place = folder.of(run)
    if folder.is_done(run):
        return Outcome(run=run, folder=place, status="finished", seconds=seconds)
    error = folder.error_of(run) or f"its process {end}"
    return Outcome(run=run, folder=place, status="failed", seconds=seconds, error=error)


@dataclass(frozen=True, slots=True)
class _Job:
    run: PlannedRun
    process: ChildProcess
    began: float


class _Pool:
    """So many processes at a time. Whatever ends it, none is left and no run stays half done."""

    def __init__(self, folder: ExperimentFolder, tell: Callable[[Outcome], None]) -> None:
        self._folder = folder
        self._tell = tell
        self._jobs: dict[int, _Job] = {}  # by the sentinel of its process

    def run(self, runs: Sequence[PlannedRun], num_jobs: int) -> list[Outcome]:
        waiting = list(reversed(runs))
        outcomes: list[Outcome] = []
        try:
            while waiting or self._jobs:
                while waiting and len(self._jobs) < num_jobs:
                    self._start(waiting.pop())
                for sentinel in has_ended(list(self._jobs), _POLL):
                    outcomes.append(self._take(sentinel))
                    self._tell(outcomes[-1])
        finally:
            self._stop()
        return outcomes

    def _start(self, run: PlannedRun) -> None:
        place = self._folder.prepare(run)
        process = ChildProcess(MODULE, f"run-{run.number}", arguments=[str(place.absolute())])
        self._jobs[process.sentinel] = _Job(run, process, time.monotonic())

    def _take(self, sentinel: int) -> Outcome:
        job = self._jobs.pop(sentinel)
        seconds = time.monotonic() - job.began
        end = job.process.wait()
        job.process.stop(grace=0)
        job.process.close()
        return outcome_of(job.run, self._folder, end, seconds)

    def _stop(self) -> None:
        for job in self._jobs.values():
            job.process.ask_to_end()
            job.process.kill()
        for job in self._jobs.values():
            job.process.stop(grace=0)
            job.process.close()
            if not self._folder.is_done(job.run):
                self._folder.clear(job.run)
        self._jobs.clear()
