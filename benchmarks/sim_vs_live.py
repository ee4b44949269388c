"""A simulation beside the engine that it simulates: the same workload, config and policies, live and simulated.

    python benchmarks/sim_vs_live.py [--model NAME] [--rounds 3] [--seconds 45] [--requests 60] [--load 0.6]
        [--policies fcfs sjf longest-first] [--json FILE] [--override KEY=VALUE ...]

A round calibrates (`tokenyard calibrate`), runs a load that the calibration has not seen live and simulated, and then
a burst under each policy, live and simulated; the figures are medians over the rounds. One engine thread. The load
comes at random times, at `--load` of the requests a second that the engine does when all are there at once. Mean TTFT,
TPOT and E2E may be 10 % off, and the policies must stand in the same order by mean E2E. Nothing else should run on the
machine.

Prints tables in Markdown, and one JSON line last. Code 1: a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch reads it

import numpy as np
from tokenyard.bench.report import machine
from tokenyard.cli.terminal import say
from tokenyard.errors import TokenyardError
from tokenyard.experiments.calibrate import calibrate
from tokenyard.experiments.run import run_workload
from tokenyard.latency_fit import write_fit
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.overrides import quote_override

if TYPE_CHECKING:
    from tokenyard.experiments.records import RequestTable, RunRecord
    from tokenyard.latency_fit import Errors

MOST_OFF = 0.10
SIDES = ("live", "simulated")
SEED, BURST_SEED = 1001, 2002  # the calibration has another one
ENGINE = (
    "executor.num_threads=1",
    "kv_cache.num_blocks=2048",
    "model.max_model_len=2048",
    "scheduler.max_num_batched_tokens=512",
)
LENGTHS = (
    "workload=synthetic",
    "workload.prompt={kind: lognormal, mean: 96, cv: 1.0, min: 4, max: 600}",
    "workload.output={kind: lognormal, mean: 40, cv: 0.8, min: 2, max: 160}",
)
FEW_PLACES = "scheduler.max_num_seqs=4"  # so that a burst waits, and its order matters


class Means(NamedTuple):
    """Seconds; of all requests of a run."""

    ttft: float
    tpot: float
    e2e: float


@dataclass(frozen=True, slots=True)
class Round:
    """One sitting's figures."""

    load: Mapping[str, Means]  # by "live" and "simulated"
    policies: Mapping[str, Mapping[str, float]]  # mean E2E, by "live" and "simulated", by policy
    in_sample: Errors
    held_out: Errors

    def row(self) -> dict[str, object]:
        calibration = {"in_sample": told(self.in_sample), "held_out": told(self.held_out)}
        means = {side: means._asdict() for side, means in self.load.items()}
        return {**means, "policies": self.policies, "calibration": calibration}


class Bench:
    """The engine and its workloads, as overrides."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self._given = given
        self._engine = [quote_override("model.name", given.model), *ENGINE, *given.override]
        self._fit = folder / "latency.json"
        for policy in given.policies:
            load_engine_config([*self._engine, f"scheduler={policy}"])  # a mistake should not cost the time before it
        self._lengths = [*LENGTHS, f"workload.num_requests={given.requests}"]

    def capacity(self) -> float:
        """Requests a second of the load's kind, when all are there at once."""
        record = self._live([*self._lengths, f"seed={SEED}", "workload.arrivals=all_at_once"])
        return len(record.requests) / float(np.nanmax(record.requests.finish))

    def round(self, rate: float) -> Round:
        say("calibrating ...")
        config, catalogue = load_engine_config(self._engine)
        file = calibrate(config, catalogue, seconds=self._given.seconds)
        write_fit(self._fit, file)
        load = [*self._lengths, f"seed={SEED}", f"workload.rate={rate}"]
        found: dict[str, dict[str, float]] = {"live": {}, "simulated": {}}
        say(f"{rate:.3f} requests a second ...")
        means = {"live": means_of(self._live(load).requests), "simulated": means_of(self._simulated(load).requests)}
        for policy in self._given.policies:
            say(f"{policy} ...")
            burst = [*self._lengths, f"seed={BURST_SEED}", "workload.arrivals=all_at_once", FEW_PLACES]
            burst.append(f"scheduler={policy}")
            found["live"][policy] = means_of(self._live(burst).requests).e2e
            found["simulated"][policy] = means_of(self._simulated(burst).requests).e2e
        return Round(load=means, policies=found, in_sample=file.in_sample, held_out=file.held_out)

    def _live(self, overrides: Sequence[str]) -> RunRecord:
        return run_workload(*load_engine_config([*self._engine, *overrides]))

    def _simulated(self, overrides: Sequence[str]) -> RunRecord:
        simulated = ["executor=simulated", "latency=fitted", quote_override("latency.path", str(self._fit))]
        return run_workload(*load_engine_config([*self._engine, *overrides, *simulated]))


def means_of(table: RequestTable) -> Means:
    """TPOT is of requests with two tokens or more."""
    first, last, output = table.first_token, table.finish, table.output
    tpot = ((last - first) / np.maximum(output - 1, 1))[output > 1]
    return Means(
        ttft=float((first - table.arrival).mean()),
        tpot=float(tpot.mean()),
        e2e=float((last - table.arrival).mean()),
    )


def median_means(rounds: Sequence[Round], side: str) -> Means:
    return Means(*(statistics.median(values) for values in zip(*(one.load[side] for one in rounds), strict=True)))


def median_policies(rounds: Sequence[Round], side: str) -> dict[str, float]:
    return {name: statistics.median(one.policies[side][name] for one in rounds) for name in rounds[0].policies[side]}


def order(seconds: Mapping[str, float]) -> list[str]:
    """The best first."""
    return sorted(seconds, key=seconds.__getitem__)


def told(errors: Errors) -> dict[str, float]:
    return {"mean": errors.mean, "median": errors.median, "total": errors.total}


@dataclass(frozen=True, slots=True)
class Verdict:
    """All rounds together."""

    rate: float
    capacity: float
    rounds: Sequence[Round]

    @property
    def means(self) -> Mapping[str, Means]:
        return {side: median_means(self.rounds, side) for side in SIDES}

    @property
    def policies(self) -> Mapping[str, Mapping[str, float]]:
        return {side: median_policies(self.rounds, side) for side in SIDES}

    @property
    def errors(self) -> Mapping[str, float]:
        pairs = zip(Means._fields, self.means["live"], self.means["simulated"], strict=True)
        return {name: said / seen - 1 for name, seen, said in pairs}

    @property
    def is_near(self) -> bool:
        return all(abs(error) <= MOST_OFF for error in self.errors.values())

    @property
    def is_same_order(self) -> bool:
        live, simulated = (order(self.policies[side]) for side in SIDES)
        return live == simulated

    def row(self) -> dict[str, object]:
        return {
            "benchmark": "sim_vs_live",
            "rate": self.rate,
            "capacity": self.capacity,
            **{side: means._asdict() for side, means in self.means.items()},
            "errors": self.errors,
            "is_near": self.is_near,
            "policies": self.policies,
            "is_same_order": self.is_same_order,
            "rounds": [one.row() for one in self.rounds],
            **machine(),
        }

    def print_tables(self) -> None:
        live, simulated = (self.means[side] for side in SIDES)
        print(f"{self.rate:.3f} requests a second; all at once the engine does {self.capacity:.3f}\n")
        print("| mean | live | simulated | off by |\n| --- | ---: | ---: | ---: |")
        for name, seen, said in zip(Means._fields, live, simulated, strict=True):
            print(f"| {name} | {1000 * seen:.1f} ms | {1000 * said:.1f} ms | {said / seen - 1:+.1%} |")
        print("\n| policy | live mean E2E | simulated | off by |\n| --- | ---: | ---: | ---: |")
        for name in order(self.policies["live"]):
            seen, said = (self.policies[side][name] for side in SIDES)
            print(f"| {name} | {seen:.2f} s | {said:.2f} s | {said / seen - 1:+.1%} |")
        print(f"\nthe order is {'the same' if self.is_same_order else 'NOT the same'}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    with tempfile.TemporaryDirectory(prefix="tokenyard-bench-") as folder:
        bench = Bench(given, Path(folder))
        say("measuring the capacity ...")
        capacity = bench.capacity()
        rate = given.load * capacity
        rounds = [bench.round(rate) for _ in range(given.rounds)]
    verdict = Verdict(rate, capacity, rounds)
    verdict.print_tables()
    line = json.dumps(verdict.row())
    if given.json is not None:
        given.json.write_text(line + "\n")
    print(line)
    return 0 if verdict.is_near and verdict.is_same_order else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=45.0, help="of a calibration")
    parser.add_argument("--requests", type=int, default=60, help="of each run")
    parser.add_argument("--load", type=float, default=0.6, help="share of the capacity")
    parser.add_argument("--policies", nargs="+", default=["fcfs", "sjf", "longest-first"])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--override", action="append", default=[], metavar="KEY=VALUE")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except TokenyardError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
