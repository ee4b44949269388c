"""How fast a simulation is: steps a second with the first 2,000 requests of the Azure conversation trace.

    python benchmarks/simulation_speed.py [--policies fcfs vtc srpt] [--rounds 5] [--limit 2000] [--json FILE]

All requests come at once, with `latency=linear` (5 ms a step, 10 us a token), 512 tokens a step, 128 requests at a
time, blocks of 16 and no prefix cache; a run ends when its table of requests is written. Policies take turns; the
figures are medians, imports and the config excluded. With their own arrival times the engine often idles, so those runs
are told in requests a second. Bars: 10,000 steps a second with fcfs, and a third of that with any other policy.

Prints a table in Markdown, and one JSON line last. Code 1: a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from policy_runs import refuse_unknown
from tokenyard.bench.report import machine
from tokenyard.experiments.run_tables import write_request_table
from tokenyard.experiments.simulation import run_simulated
from tokenyard.launch.compose import load_engine_config

BASE, LEAST_STEPS = "fcfs", 10_000.0
SETTINGS = (
    "executor=simulated",
    "workload=azure_conv",
    "latency=linear",
    "latency.per_step=0.005",
    "latency.per_token=1e-5",
    "scheduler.max_num_batched_tokens=512",
    "scheduler.max_num_seqs=128",
    "kv_cache.block_size=16",
    "kv_cache.enable_prefix_caching=false",
)


class Run(NamedTuple):
    seconds: float
    num_steps: int
    num_requests: int


def timed(policy: str, arrivals: str, limit: int) -> Run:
    """One run, from an EngineConfig to the written table."""
    overrides = (f"scheduler={policy}", f"workload.limit={limit}", f"workload.arrivals={arrivals}")
    config, catalogue = load_engine_config([*SETTINGS, *overrides])
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        record = run_simulated(config, catalogue)
        write_request_table(record.requests, Path(folder) / "requests.csv")
        seconds = time.perf_counter() - began
    return Run(seconds, record.totals.num_steps or 0, len(record.requests))


def steps_a_second(policies: Sequence[str], rounds: int, limit: int) -> dict[str, float]:
    """Medians over the rounds; the first of each policy only warms up."""
    found: dict[str, list[float]] = {policy: [] for policy in policies}
    for number in range(rounds + 1):
        for policy in policies:
            run = timed(policy, "all_at_once", limit)
            if number:
                found[policy].append(run.num_steps / run.seconds)
    return {policy: statistics.median(values) for policy, values in found.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure how fast a simulation is.")
    parser.add_argument("--policies", nargs="+", default=[BASE, "vtc", "srpt"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--limit", type=int, default=2000)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(arguments)
    refuse_unknown(parser, given.policies)
    speeds = steps_a_second(given.policies, given.rounds, given.limit)
    own = timed(BASE, "trace", given.limit)
    bars = {policy: LEAST_STEPS if policy == BASE else LEAST_STEPS / 3 for policy in speeds}
    print("| policy | steps/s | bar |\n| --- | --- | --- |")
    for policy, speed in speeds.items():
        print(f"| {policy} | {speed:.0f} | {bars[policy]:.0f} |")
    own_rate = own.num_requests / own.seconds
    print(f"\nWith their own arrival times: {own_rate:.0f} requests/s, {own.num_steps / own.seconds:.0f} steps/s")
    result = {"steps_a_second": speeds, "own_arrivals": own._asdict(), "requests_a_second": own_rate, **machine()}
    line = json.dumps(result)
    print(f"\n{line}")
    if given.json is not None:
        given.json.write_text(f"{line}\n", encoding="utf-8")
    return int(any(speeds[policy] < bar for policy, bar in bars.items()))


if __name__ == "__main__":
    sys.exit(main())
