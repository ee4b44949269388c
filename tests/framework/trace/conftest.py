"""A recorded run for tests that read one."""

from __future__ import annotations

from pathlib import Path

import pytest
from traced_runs import SMALL, base_config, drive, harness, traced, with_sizes


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """One in which requests were preempted, hit the cache and waited."""
    path = tmp_path / "trace.jsonl"
    with harness(traced(with_sizes(base_config("scheduler=priority"), SMALL), path)) as engine:
        drive(engine, seed=3, num_turns=60)
        assert engine.stats.num_preemptions
        assert engine.stats.prefix_cache_hits
    return path
