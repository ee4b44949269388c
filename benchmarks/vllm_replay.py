"""Replays of measured vLLM runs: the engine's own scheduler on kernel profiles, beside what vLLM took.

    python benchmarks/vllm_replay.py [--runs FOLDER] [--json FILE]

FOLDER has `GPU_llama31-8b_requests.jsonl` and `GPU_llama31-8b_meta.json` as LLMServingSim publishes them, of the GPUs
that a profile ships for; a copy is in tests/fixtures. Each run is simulated with the settings of its meta file, on
`latency=profiled` as it ships, and once more with one constant, `latency.overhead`, fitted to the mean TPOT. vLLM 0.19
schedules while a step runs, so the loop is `engine=overlap`. Times count from arrival; the clock of the arrivals is
another one, and is shifted so that the request that was queued soonest was queued at once. Errors are of means.

Prints tables in Markdown, of means (what was measured before what was simulated) and of the errors of percentiles, and
one JSON line last. Code 1: a bar is missed.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenyard.errors import TokenyardError
from tokenyard.experiments.simulation import run_simulated
from tokenyard.launch.compose import load_engine_config

RUNS = Path(__file__).resolve().parent.parent / "tests" / "fixtures" / "vllm_measured"
GPUS = ("rtxpro6000", "rtx4090")
METRICS = ("ttft", "tpot", "e2e")
PERCENTILES = (50, 90, 99)
BARS: Mapping[str, Mapping[str, float]] = {  # percent
    "as it ships": {"tpot": 10.0, "e2e": 15.0},
    "fitted": {"ttft": 5.0, "e2e": 3.0},
}
PUBLISHED = {  # percent, of means: bench/examples/*/Llama-3.1-8B/validation/summary.txt of LLMServingSim 5daddb21
    "rtxpro6000": {"ttft": -4.0, "tpot": -1.0, "e2e": -1.8},
    "rtx4090": {"ttft": 0.6, "tpot": 0.2, "e2e": 0.5},
}
TOKENS_PER_HASH = 512
MOST_OVERHEAD = 0.01  # seconds a step
FITTING_RUNS = 16

Times = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A run of vLLM, requests in order of arrival; times in seconds since the first."""

    gpu: str
    overrides: tuple[str, ...]  # its settings
    arrival: Times
    num_prompt: NDArray[np.int64]
    num_output: NDArray[np.int64]
    first_token: Times
    last_token: Times

    def means(self) -> dict[str, float]:
        return means(self.arrival, self.first_token, self.last_token, self.num_output)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """One simulated run. Errors are percent of what was measured."""

    gpu: str
    kind: str
    overhead: float  # seconds a step
    simulated: dict[str, float]
    measured: dict[str, float]

    def error(self, metric: str) -> float:
        return 100 * (self.simulated[metric] / self.measured[metric] - 1)

    def misses(self) -> list[str]:
        return [
            f"{self.gpu}, {self.kind}: mean {metric} {self.error(metric):+.1f} %, the bar is {bar:g} %"
            for metric, bar in BARS[self.kind].items()
            if abs(self.error(metric)) > bar
        ]


def means(arrival: Times, first: Times, last: Times, num_output: NDArray[np.int64]) -> dict[str, float]:
    """Means by metric, and percentiles, such as ttft_p50. Of a request of one token there is no TPOT."""
    several = num_output > 1
    tpot = (last - first)[several] / (num_output[several] - 1)
    values: dict[str, float] = {}
    for name, times in (("ttft", first - arrival), ("tpot", tpot), ("e2e", last - arrival)):
        values[name] = float(np.mean(times))
        values |= {f"{name}_p{q}": float(np.percentile(times, q)) for q in PERCENTILES}
    return values


def load_run(folder: Path, gpu: str) -> Measured:
    with (folder / f"{gpu}_llama31-8b_requests.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file if line.strip()]
    meta = json.loads((folder / f"{gpu}_llama31-8b_meta.json").read_text(encoding="utf-8"))
    columns = {key: np.array([row[key] for row in rows]) for key in rows[0] if key != "request_id"}
    shift = float(np.min(columns["queued_ts"] - columns["arrival_time"]))
    arrival = columns["arrival_time"] + shift
    order = np.argsort(arrival, kind="stable")
    start = arrival[order[0]]
    return Measured(
        gpu=gpu,
        overrides=settings(meta),
        arrival=arrival[order] - start,
        num_prompt=columns["input_toks"][order],
        num_output=columns["output_toks"][order],
        first_token=columns["first_token_ts"][order] - start,
        last_token=columns["last_token_ts"][order] - start,
    )


def settings(meta: Mapping[str, Mapping[str, int]]) -> tuple[str, ...]:
    """vLLM counts the one block that it never hands out. A run that names no number of blocks had more than it used."""
    engine, cache = meta["engine_kwargs"], meta.get("kv_cache")
    overrides = [
        f"scheduler.max_num_seqs={engine['max_num_seqs']}",
        f"scheduler.max_num_batched_tokens={engine['max_num_batched_tokens']}",
        "model.max_model_len=32768",
    ]
    if cache is not None:
        overrides += [
            f"kv_cache.num_blocks={cache['num_gpu_blocks'] - 1}",
            f"kv_cache.block_size={cache['block_size']}",
            f"kv_cache.enable_prefix_caching={str(cache['enable_prefix_caching']).lower()}",
        ]
    return tuple(overrides)


def write_trace(run: Measured, path: Path) -> None:
    """No prompt is like another: a request that is preempted may find its own blocks again, and nothing else."""
    lines, next_hash = [], 0
    for arrival, prompt, output in zip(run.arrival, run.num_prompt, run.num_output, strict=True):
        num_hashes = -(-int(prompt) // TOKENS_PER_HASH)
        hashes = list(range(next_hash, next_hash + num_hashes))
        next_hash += num_hashes
        row = {"arrival": float(arrival), "prompt": int(prompt), "output": int(output), "hash_ids": hashes}
        lines.append(json.dumps(row))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def simulate(run: Measured, trace: Path, overhead: float) -> dict[str, float]:
    config, catalogue = load_engine_config(
        [
            "executor=simulated",
            "engine=overlap",
            "workload=trace",
            "workload.format=jsonl",
            f"workload.path={trace}",
            f"workload.tokens_per_hash={TOKENS_PER_HASH}",
            "latency=profiled",
            f"latency.profile={run.gpu}-llama-3.1-8b",
            f"latency.overhead={overhead!r}",
            *run.overrides,
        ]
    )
    requests = run_simulated(config, catalogue).requests
    return means(requests.arrival, requests.first_token, requests.finish, requests.output.astype(np.int64))


def fitted_overhead(run: Measured, trace: Path) -> float:
    """By halving: TPOT grows with it. 0 where the profile alone is slow enough."""
    target, low, high = run.means()["tpot"], 0.0, MOST_OVERHEAD
    for _ in range(FITTING_RUNS):
        middle = (low + high) / 2
        if simulate(run, trace, middle)["tpot"] > target:
            high = middle
        else:
            low = middle
    return low


def replays(run: Measured, trace: Path) -> list[Replay]:
    fitted = fitted_overhead(run, trace)
    return [
        Replay(
            gpu=run.gpu,
            kind=kind,
            overhead=overhead,
            simulated=simulate(run, trace, overhead),
            measured=run.means(),
        )
        for kind, overhead in (("as it ships", 0.0), ("fitted", fitted))
    ]


def table(results: Sequence[Replay]) -> str:
    lines = [
        "| GPU | latency.overhead | TTFT (s) | TPOT (ms) | E2E (s) | by LLMServingSim (%) |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for replay in results:
        cells = [
            f"{replay.measured[metric] * scale:.3f}, {replay.simulated[metric] * scale:.3f} "
            f"({replay.error(metric):+.1f} %)"
            for metric, scale in zip(METRICS, (1, 1000, 1), strict=True)
        ]
        published = ", ".join(f"{metric.upper()} {PUBLISHED[replay.gpu][metric]:+.1f}" for metric in METRICS)
        kind = f"{replay.overhead * 1e6:.0f} us, {replay.kind}"
        lines.append(f"| {replay.gpu} | {kind} | {' | '.join(cells)} | {published} |")
    return "\n".join(lines)


def percentile_table(results: Sequence[Replay]) -> str:
    """Errors in percent."""
    columns = [f"{metric}_p{q}" for metric in METRICS for q in PERCENTILES]
    lines = [
        f"| GPU | {' | '.join(column.upper().replace('_', ' ') for column in columns)} |",
        "| --- " * (1 + len(columns)) + "|",
    ]
    for replay in results:
        errors = " | ".join(f"{replay.error(column):+.1f}" for column in columns)
        lines.append(f"| {replay.gpu}, {replay.kind} | {errors} |")
    return "\n".join(lines)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=RUNS, help="folder of the measured runs")
    parser.add_argument("--json", type=Path, help="file for the results")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parsed(arguments)
    results: list[Replay] = []
    with tempfile.TemporaryDirectory() as folder:
        for gpu in GPUS:
            run = load_run(options.runs, gpu)
            trace = Path(folder) / f"{gpu}.jsonl"
            write_trace(run, trace)
            results += replays(run, trace)
    print(table(results), percentile_table(results), sep="\n\n", end="\n\n")
    misses = [miss for replay in results for miss in replay.misses()]
    print(*misses, sep="\n", file=sys.stderr)
    line = json.dumps([asdict(replay) for replay in results])
    if options.json is not None:
        options.json.write_text(line + "\n", encoding="utf-8")
    print(line)
    return 1 if misses else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (TokenyardError, OSError, KeyError, ValueError) as error:
        sys.exit(f"error: {error}")
