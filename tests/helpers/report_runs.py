"""Folders of runs, written as `tokenyard experiment` writes them, of a queue that is made with a few lines of numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenyard.experiments.metrics import run_metrics
from tokenyard.experiments.records import RequestTable, RunRecord, RunTotals, StepTable, TokenGaps
from tokenyard.experiments.run_folder import write_run
from tokenyard.experiments.slo import SLO

NUM_REQUESTS = 60
TTFT_OF_A_SECOND = SLO(ttft=1.0)


def queue_record(seed: int, *, slowness: float, time_scale: float, num_requests: int = NUM_REQUESTS) -> RunRecord:
    """One request at a time: 0.1 s of prefill and 0.9 s of decode, both times `slowness`; two clients."""
    random = np.random.default_rng(seed)
    arrival = np.cumsum(random.exponential(1.5, num_requests)) * time_scale
    start, free = np.empty(num_requests), 0.0
    for number, time in enumerate(arrival):
        start[number] = max(free, time)
        free = start[number] + slowness
    finish = start + slowness
    numbers = np.arange(num_requests)
    table = RequestTable(
        id=numbers.astype(np.int64),
        client=(numbers % 2).astype(np.int32),
        clients=("alice", "<b>bob</b>"),
        session=np.full(num_requests, -1, dtype=np.int32),
        sessions=(),
        arrival=arrival,
        first_scheduled=start,
        first_token=start + 0.1 * slowness,
        finish=finish,
        prompt=random.integers(1, 100, num_requests).astype(np.int32),
        output=np.full(num_requests, 10, dtype=np.int32),
        cached=np.zeros(num_requests, dtype=np.int32),
        preemptions=(numbers == 3).astype(np.int32),
        recomputed=np.zeros(num_requests, dtype=np.int32),
        priority=np.zeros(num_requests, dtype=np.int64),
        deadline=np.full(num_requests, np.nan),
        status=np.zeros(num_requests, dtype=np.int8),
    )
    ones = np.ones(num_requests, dtype=np.int32)
    steps = StepTable(
        start=start,
        end=finish,
        running=ones,
        waiting=(numbers % 4 / time_scale**9).astype(np.int32),
        prefill_tokens=table.prompt,
        decode_tokens=9 * ones,
        used_blocks=(7 * ones).astype(np.int32),
    )
    totals = RunTotals(
        num_steps=num_requests,
        num_computed_tokens=int(table.prompt.sum()) + 9 * num_requests,
        num_preemptions=1,
        busy_seconds=slowness * num_requests,
        mean_kv_usage=0.07,
        max_kv_usage=0.07,
        mean_batch_size=1.0,
        mean_budget_usage=0.5,
        scheduler_seconds=0.01,
    )
    gaps = TokenGaps(seconds=np.array([0.1 * slowness]), counts=np.array([9 * num_requests]))
    return RunRecord(requests=table, gaps=gaps, totals=totals, steps=steps)


def write_queue_run(
    folder: Path,
    scheduler: str = "fcfs",
    seed: int = 1,
    *,
    slowness: float = 1.0,
    time_scale: float = 1.0,
    engine: str = "sync",
    overrides: tuple[str, ...] | None = None,
    config_hash: str | None = None,
    num_requests: int = NUM_REQUESTS,
    slo: SLO = TTFT_OF_A_SECOND,
    commit: str = "c0ffee",
) -> Path:
    """A finished run in `folder`."""
    record = queue_record(seed, slowness=slowness, time_scale=time_scale, num_requests=num_requests)
    given = (f"scheduler={scheduler}", f"workload.time_scale={time_scale}") if overrides is None else overrides
    loop = () if engine == "sync" else (f"engine={engine}",)
    facts = {
        "config_hash": config_hash or f"{scheduler} {time_scale} {seed} {engine} {given}",
        "tokenyard": "0.1.0",
        "commit": commit,
        "components": [
            {"kind": "scheduler", "name": "batch", "distribution": "tokenyard", "version": "0.1.0"},
            {"kind": "policy", "name": scheduler, "distribution": "tokenyard", "version": "0.1.0"},
        ],
        "engine": engine,
        "executor": "simulated",
        "target": None,
        "seed": seed,
        "workload": {"name": "synthetic", "description": "a queue & its <clients>"},
        "latency": {"name": "constant", "calibration": "set by hand"},
    }
    metrics = run_metrics(record, slo)
    write_run(folder, record, metrics, facts, [*given, *loop, f"seed={seed}"])
    return folder


def write_experiment(root: Path, *, seeds: tuple[int, ...] = (1, 2, 3)) -> Path:
    """Two schedulers, of which `sjf` is the faster, at two loads with several seeds."""
    number = 0
    for scheduler, slowness in (("fcfs", 1.0), ("sjf", 0.8)):
        for time_scale in (1.0, 0.8):
            for seed in seeds:
                write_queue_run(root / str(number), scheduler, seed, slowness=slowness, time_scale=time_scale)
                number += 1
    return root
