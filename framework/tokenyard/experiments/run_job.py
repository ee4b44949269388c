"""One run of an experiment, in a process of its own: from the config in a folder to the results beside it."""

from __future__ import annotations

import logging
import sys
import time
import traceback
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from tokenyard.errors import TokenyardError
from tokenyard.experiments.config_file import read_config, read_overrides
from tokenyard.experiments.facts import run_facts
from tokenyard.experiments.judging import judged
from tokenyard.experiments.run import run_workload
from tokenyard.experiments.run_folder import write_run, write_whole
from tokenyard.experiments.sinks import check_sinks, send
from tokenyard.ipc.child import begin_child, end_now
from tokenyard.launch.steering import make_latency_model

if TYPE_CHECKING:
    from tokenyard.config import EngineConfig

MODULE = "tokenyard.experiments.run_job"
ERROR = "error.txt"
"""Why the last try of a run failed: one line, and for a bug where it came from."""


def main() -> None:
    """Of the child: the folder is its argument."""
    arguments = begin_child(end_now).arguments
    logging.basicConfig(format="%(levelname)s: %(message)s", level=logging.WARNING, stream=sys.stderr)
    sys.exit(run_and_tell(Path(arguments[0])))


def run_and_tell(folder: Path) -> int:
    """The exit code; what went wrong is in ERROR."""
    (folder / ERROR).unlink(missing_ok=True)
    try:
        run_in(folder)
    except TokenyardError as error:
        write_whole(folder / ERROR, f"{' '.join(str(error).splitlines())}\n")
        return error.exit_code
    except Exception as error:  # a bug, of a plugin or of ours: the other runs go on
        told = " ".join(f"{type(error).__name__}: {error}".splitlines())
        write_whole(folder / ERROR, f"{told}\n\n{traceback.format_exc()}")
        return 1
    return 0


def run_in(folder: Path) -> None:
    """Run what the folder's config says, and write the results. Raises what a run raises, and OSError."""
    config, catalogue = read_config(folder)
    check_sinks(config.experiment.sinks)
    began, start = datetime.now(UTC), time.perf_counter()
    record = run_workload(with_traces_in(config, folder), catalogue, keeps_steps=config.experiment.keep_steps)
    seconds = time.perf_counter() - start
    latency = make_latency_model(config, catalogue)
    metrics = judged(record, config, latency)
    facts = run_facts(config, catalogue, latency_used=latency)
    if record.facts:  # of a live run: what the engine or the server turned out to be
        facts = {**facts, "ran_on": dict(record.facts)}
    if config.experiment.sinks:  # before the folder is done: what a sink did not get is run again
        send(config.experiment.sinks, facts, metrics, folder=folder)
    times = {"began": began.isoformat(), "seconds": seconds}
    write_run(folder, record, metrics, facts, read_overrides(folder), times=times)


def with_traces_in(config: EngineConfig, folder: Path) -> EngineConfig:
    """Each run has its own traces: a path that is not absolute is one in its folder. What an earlier try left goes."""
    trace = config.trace
    placed = {
        name: None if value is None else str(folder.absolute() / value)
        for name, value in (("path", trace.path), ("chrome", trace.chrome))
    }
    for path in placed.values():
        if path is not None and Path(path).is_relative_to(folder.absolute()):
            Path(path).unlink(missing_ok=True)
    return replace(config, trace=replace(trace, **placed))
