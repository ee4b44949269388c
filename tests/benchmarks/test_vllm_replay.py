"""The replay of measured vLLM runs: what must hold of both, and that a miss is told."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

GPUS = ("rtxpro6000", "rtx4090")
FITTED = {"rtxpro6000": 0.00101, "rtx4090": 0.000025}  # seconds a step, as the benchmark finds them


@pytest.fixture
def replay(script: Callable[[str], ModuleType]) -> ModuleType:
    return script("vllm_replay")


@pytest.mark.slow
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("kind", ["as it ships", "fitted"])
def test_a_replay_on_kernel_profiles_is_as_close_to_vllm_as_it_must_be(
    replay: ModuleType, tmp_path: Path, gpu: str, kind: str
) -> None:
    run = replay.load_run(replay.RUNS, gpu)
    replay.write_trace(run, tmp_path / "trace.jsonl")
    overhead = FITTED[gpu] if kind == "fitted" else 0.0
    simulated = replay.simulate(run, tmp_path / "trace.jsonl", overhead)
    result = replay.Replay(gpu=gpu, kind=kind, overhead=overhead, simulated=simulated, measured=run.means())
    assert result.misses() == []
    if kind == "fitted":
        assert abs(result.error("tpot")) < 0.2


def test_the_measured_runs_have_the_means_that_were_published(replay: ModuleType) -> None:
    """Of TPOT: TTFT and E2E are counted from arrival here, and from the queue there."""
    for gpu, milliseconds in (("rtxpro6000", 32.5), ("rtx4090", 32.4)):
        run = replay.load_run(replay.RUNS, gpu)
        assert len(run.arrival) == 300
        assert run.arrival[0] == 0
        assert round(1000 * run.means()["tpot"], 1) == milliseconds


def test_the_settings_of_a_run_are_those_of_its_meta_file(replay: ModuleType) -> None:
    meta = {
        "engine_kwargs": {"max_num_seqs": 7, "max_num_batched_tokens": 99},
        "kv_cache": {"num_gpu_blocks": 11, "block_size": 32, "enable_prefix_caching": True},
    }
    overrides = replay.settings(meta)
    assert "scheduler.max_num_seqs=7" in overrides
    assert "kv_cache.num_blocks=10" in overrides
    assert "kv_cache.enable_prefix_caching=true" in overrides


def test_a_missed_bar_is_told_and_shown(replay: ModuleType) -> None:
    measured = dict.fromkeys(replay.METRICS, 1.0)
    simulated = {**measured, "e2e": 0.9}
    result = replay.Replay(gpu="rtx4090", kind="fitted", overhead=0, measured=measured, simulated=simulated)
    (miss,) = result.misses()
    assert "e2e -10.0 %" in miss
    assert "(-10.0 %)" in replay.table([result])


def test_percentiles_stand_beside_the_means(replay: ModuleType) -> None:
    zeros, ends = np.zeros(3), np.array([2.0, 4.0, 9.0])
    figures = replay.means(zeros, zeros + 1, ends, np.array([2, 2, 1]))
    assert figures["tpot"] == 2
    assert figures["e2e"] == 5
    assert figures["e2e_p50"] == 4
    assert figures["tpot_p50"] == 2
    result = replay.Replay(gpu="rtx4090", kind="fitted", overhead=0, measured=figures, simulated=figures)
    assert replay.percentile_table([result]).count("+0.0") == 9
