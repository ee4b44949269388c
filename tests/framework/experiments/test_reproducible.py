"""The same seed gives the same bytes, in any process; what was traced is decided the same again."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tokenyard.experiments.run_tables import write_request_table, write_steps
from tokenyard.experiments.simulation import run_simulated
from tokenyard.launch.compose import load_engine_config
from tokenyard.launch.overrides import quote_override
from tokenyard.replay.run import replay

BASE = (
    "executor=simulated",
    "latency=linear",
    "latency.per_step=0.005",
    "latency.per_token=1e-5",
    "scheduler.max_num_seqs=16",
    "scheduler.max_num_batched_tokens=256",
    "kv_cache.block_size=16",
    "kv_cache.num_blocks=270",  # so few that requests lose their blocks
    "model.max_model_len=4300",
)
WITHOUT_CONTENT = ("workload=azure_conv", "workload.limit=25", "workload.time_scale=0.01", "workload.clients=3")
WITH_CONTENT = ("workload=shared_prefix", "workload.limit=25", "workload.arrivals=all_at_once")
FOLLOW_UPS = ("workload=multi_turn", "workload.limit=25", "workload.time_scale=0.1")


def simulate_to(path: Path, *overrides: str) -> bytes:
    """The CSV of the requests and of the steps."""
    record = run_simulated(*load_engine_config([*BASE, *overrides]), keeps_steps=True)
    assert record.steps is not None
    assert len(record.requests) == 25
    write_request_table(record.requests, path)
    write_steps(record.steps, path.with_suffix(".steps"))
    return path.read_bytes() + path.with_suffix(".steps").read_bytes()


@pytest.mark.parametrize(
    ("policy", "loop", "workload"),
    [
        ("fcfs", "sync", WITHOUT_CONTENT),
        ("srpt", "overlap", WITHOUT_CONTENT),
        ("vtc", "sync", WITHOUT_CONTENT),
        ("random", "overlap", WITH_CONTENT),
        ("dlpm", "overlap", WITH_CONTENT),
        ("mlfq", "overlap", FOLLOW_UPS),
        ("plas", "sync", FOLLOW_UPS),
    ],
)
def test_a_simulation_is_replayed_from_its_trace_to_the_bit(
    tmp_path: Path, policy: str, loop: str, workload: tuple[str, ...]
) -> None:
    path = tmp_path / "trace.jsonl"
    chosen = (f"scheduler={policy}", f"engine={loop}", *workload)
    traced = simulate_to(tmp_path / "a.csv", *chosen, quote_override("trace.path", str(path)))
    result = replay(path)
    assert result.difference is None
    assert not result.notes
    assert result.num_steps > 25
    assert simulate_to(tmp_path / "b.csv", *chosen) == traced  # being traced changes nothing, nor does another time


def test_the_tight_cache_makes_requests_lose_their_blocks() -> None:
    """Otherwise the replays above would prove less than they say."""
    record = run_simulated(*load_engine_config([*BASE, *WITHOUT_CONTENT]))
    assert record.totals.num_preemptions


def test_another_seed_gives_other_requests(tmp_path: Path) -> None:
    given = (*WITHOUT_CONTENT, "scheduler=fcfs")
    assert simulate_to(tmp_path / "a.csv", *given, "seed=1") != simulate_to(tmp_path / "b.csv", *given, "seed=2")


_PROGRAM = """
import hashlib, sys
from pathlib import Path
from tokenyard.experiments.run_tables import write_request_table
from tokenyard.experiments.simulation import run_simulated
from tokenyard.launch.compose import load_engine_config
path = Path(sys.argv[1])
write_request_table(run_simulated(*load_engine_config(sys.argv[2:])).requests, path)
print(hashlib.sha256(path.read_bytes()).hexdigest())
"""


def test_the_order_of_hashes_changes_no_byte(tmp_path: Path) -> None:
    given = (*BASE, *WITH_CONTENT, "scheduler=dlpm", "workload.clients=3")
    found = set()
    for seed in ("0", "4242"):
        done = subprocess.run(
            [sys.executable, "-c", _PROGRAM, str(tmp_path / seed), *given],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout.strip())
    assert len(found) == 1
    assert found == {hashlib.sha256((tmp_path / "0").read_bytes()).hexdigest()}
