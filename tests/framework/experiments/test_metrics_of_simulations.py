"""Metrics of what engines really did, where theory says what must come out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import cast

import pytest
from tokenyard.experiments.simulate import simulate

LINEAR = ("latency=linear", "latency.per_step=0.005", "latency.per_token=1e-4", "latency.per_context_token=1e-6")


def trace(path: Path, requests: list[dict[str, object]]) -> list[str]:
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return ["workload=trace", "workload.format=jsonl", f"workload.path={path}"]


@pytest.mark.parametrize("engine", ["sync", "overlap"])
def test_one_request_at_a_time_is_as_fast_as_alone(tmp_path: Path, engine: str) -> None:
    """Prompts that end within a chunk, with one, and with one token more than one, under a step time that grows."""
    sizes = [(prompt, output) for prompt in (1, 2, 63, 64, 65, 129, 700) for output in (1, 2, 90)]
    requests: list[dict[str, object]] = [
        {"arrival": 0.01 * n, "prompt": prompt, "output": output} for n, (prompt, output) in enumerate(sizes)
    ]
    workload = trace(tmp_path / "trace.jsonl", requests)
    metrics = simulate(
        [*workload, *LINEAR, "workload.arrivals=sequential", "scheduler.max_num_batched_tokens=64", f"engine={engine}"]
    ).metrics
    assert metrics["slowdown"] == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), pytest.approx(1.0))
    assert metrics["queueing_delay"] == dict.fromkeys(("mean", "p50", "p90", "p99", "max"), pytest.approx(0.0))
    assert cast("dict[str, object]", metrics["saturation"])["class"] == "STABLE"


def test_vtc_keeps_backlogged_clients_within_its_bound_and_closer_than_fcfs_does(tmp_path: Path) -> None:
    """One client sends three times as many requests as the other, all at once."""
    requests: list[dict[str, object]] = [
        {"arrival": 0.0, "prompt": 40, "output": 30, "client": "few" if n % 4 == 0 else "many"} for n in range(120)
    ]
    settings = [*trace(tmp_path / "trace.jsonl", requests), *LINEAR, "scheduler.max_num_seqs=8"]
    found = {
        policy: cast("dict[str, float]", simulate([*settings, f"scheduler={policy}"]).metrics["fairness"])
        for policy in ("fcfs", "vtc")
    }
    assert found["vtc"]["max_service_difference"] <= found["vtc"]["vtc_bound"]
    assert found["vtc"]["max_service_difference"] < found["fcfs"]["max_service_difference"] / 3
    assert found["vtc"]["jain_backlogged"] > 0.99
    assert found["fcfs"]["jain_backlogged"] < 0.85
    assert found["vtc"]["jain_service"] == pytest.approx(found["fcfs"]["jain_service"])
