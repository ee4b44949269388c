"""`tokenyard experiment [-m] [--out DIR] [overrides]`: one run, or a run for each combination of values."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tokenyard.cli.arguments import Given, Parser, make_parser, one_line_errors, parse
from tokenyard.cli.run_progress import RunProgress
from tokenyard.cli.terminal import say
from tokenyard.errors import UserError
from tokenyard.launch.flags import Flagged
from tokenyard.launch.hydra_jobs import check_launcher, split_hydra_overrides
from tokenyard.launch.overrides import quote_override

if TYPE_CHECKING:
    from tokenyard.experiments.experiment_folder import ExperimentFolder
    from tokenyard.experiments.multirun import Outcome
    from tokenyard.experiments.plan import Plan

_SHOWN = ("ttft mean", "ttft p99", "tpot mean", "tpot p99", "e2e mean")


def command_parser() -> Parser:
    """The command's own flags."""
    parser = make_parser(
        "experiment",
        "[-m] [--out DIR] [--json] [overrides]",
        "Run a workload and keep what came of it; with -m once for each combination of values that the overrides name, "
        "such as scheduler=fcfs,sjf seed=1,2,3. The same command with the same folder goes on where it was left. "
        "hydra/launcher=joblib and the like start the runs instead of this command. Exit code 1: a run failed.",
    )
    parser.add_argument("-m", "--multirun", action="store_true", help="a run for each combination of values")
    parser.add_argument("--out", metavar="DIR", help="the folder, as experiment.dir; experiments/DATE/TIME by default")
    parser.add_argument("--json", action="store_true", help="print JSON, on one line")
    return parser


def main(arguments: Sequence[str]) -> int:
    """0 = every run is done, 1 = some failed."""
    hydra = split_hydra_overrides(arguments)
    given = parse(command_parser(), hydra.others)
    given.refuse_words()
    if hydra.launcher:
        if not given.flags.multirun:
            raise UserError(f"{hydra.launcher[0]}: one run needs no launcher; leave it out, or give -m")
        check_launcher(hydra.launcher)
    from tokenyard.experiments.experiment_folder import (  # what bad usage need not wait for
        ExperimentFolder,
        default_folder,
    )

    plan = _plan(given)
    place = plan.config.experiment.dir
    folder = ExperimentFolder(default_folder(datetime.now()) if place is None else Path(place), plan)
    with folder.opened():
        say(f"{folder.path}: {len(plan.runs)} run{'s' if len(plan.runs) > 1 else ''}")
        if num_stale := sum(map(folder.is_stale, plan.runs)):
            say(f"note: {num_stale} results there are of another config, of another version maybe; they are made again")
        outcomes = _run(plan, folder, hydra.launcher)
    failed = [outcome for outcome in outcomes if outcome.status == "failed"]
    print(json.dumps(_values(folder.path, outcomes)) if given.flags.json else _table(outcomes))
    if failed and not given.flags.json:
        say(f"{len(failed)} of {len(outcomes)} runs failed; the same command makes them again")
    return 1 if failed else 0


def _plan(given: Given) -> Plan:
    """Runs are simulated unless an override says otherwise; who names no latency model gets one, and is told."""
    from tokenyard.experiments.plan import plan_experiment
    from tokenyard.experiments.simulate import DEFAULT_LATENCY

    overrides = [Flagged("executor=simulated", "experiment"), *given.overrides]
    if given.flags.out is not None:
        overrides.append(Flagged(quote_override("experiment.dir", given.flags.out), "--out"))
    with one_line_errors():
        plan = plan_experiment(
            overrides, config_file=given.config_file, is_multirun=given.flags.multirun, latency=DEFAULT_LATENCY
        )
    if plan.runs[0].overrides[: len(DEFAULT_LATENCY)] == DEFAULT_LATENCY:
        say(f"note: no latency model is named; a step takes as long as {' '.join(DEFAULT_LATENCY)} says")
    return plan


def _run(plan: Plan, folder: ExperimentFolder, launcher: Sequence[str]) -> list[Outcome]:
    from tokenyard.experiments.launched import run_launched
    from tokenyard.experiments.multirun import run_all

    with RunProgress(len(plan.runs)) as progress:
        return run_launched(plan, folder, launcher, progress.tell) if launcher else run_all(plan, folder, progress.tell)


def _values(folder: Path, outcomes: Sequence[Outcome]) -> dict[str, object]:
    from tokenyard.experiments.run_folder import read_result

    runs = [
        {
            "number": outcome.run.number,
            "folder": str(outcome.folder),
            "overrides": list(outcome.run.overrides),
            "config_hash": outcome.run.config_hash,
            "status": outcome.status,
            "error": outcome.error,
            "metrics": None if outcome.status == "failed" else read_result(outcome.folder)["metrics"],
        }
        for outcome in outcomes
    ]
    return {"dir": str(folder), "failed": sum(outcome.status == "failed" for outcome in outcomes), "runs": runs}


def _table(outcomes: Sequence[Outcome]) -> str:
    """A line for each run that is done, in milliseconds; of a single run more."""
    from tokenyard.bench.report import table
    from tokenyard.experiments.run_folder import read_result
    from tokenyard.experiments.summary import told_run

    if len(outcomes) == 1 and outcomes[0].status != "failed":
        result = read_result(outcomes[0].folder)
        return told_run(*(cast("Mapping[str, object]", result[key]) for key in ("metrics", "facts")))
    rows = []
    for outcome in outcomes:
        if outcome.status == "failed":
            continue
        metrics = read_result(outcome.folder)["metrics"]
        times = {name: _milliseconds(metrics, *name.split(" ")) for name in _SHOWN}
        rows.append({"run": outcome.run.number, "milliseconds": " ".join(outcome.run.varying), **times})
    return table(rows, ["run", "milliseconds", *_SHOWN]) if rows else "no run is done"


def _milliseconds(metrics: object, name: str, statistic: str) -> object:
    """A statistic of a metric, as a table shows it."""
    values = metrics.get(name) if isinstance(metrics, dict) else None
    value = values.get(statistic) if isinstance(values, dict) else None
    return 1000 * value if isinstance(value, int | float) else "-"
