"""Which requests of a trace a seed selects: never the same for two seeds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.errors import ConfigError
from tokenyard.experiments.traces.windows import select
from tokenyard.interfaces.workload import WorkloadRequest
from trace_workloads import preset, trace_workload, write_jsonl, write_steady


def prompts(path: Path, *overrides: str) -> list[int]:
    return [one.num_prompt_tokens for one in trace_workload(path, *overrides).requests()]


def rows(num_rows: int) -> list[WorkloadRequest]:
    return [WorkloadRequest(arrival=3.0 + n, num_prompt_tokens=n + 1, num_output_tokens=1) for n in range(num_rows)]


def test_seed_0_is_the_trace_and_a_limit_its_first_rows(tmp_path: Path) -> None:
    path = write_steady(tmp_path / "t", 10)
    assert prompts(path) == list(range(1, 11))
    assert prompts(path, "workload.limit=4") == [1, 2, 3, 4]
    assert next(trace_workload(path).requests()).arrival == 5.0


def test_seed_k_is_the_kth_disjoint_window_and_begins_at_0(tmp_path: Path) -> None:
    workload = trace_workload(write_steady(tmp_path / "t", 10), "workload.limit=3", "seed=2")
    assert [(one.arrival, one.num_prompt_tokens) for one in workload.requests()] == [(0, 7), (1, 8), (2, 9)]
    assert "rows 7 to 9 (window 2 of 3 rows)" in workload.description


def test_windows_skip_rows_that_are_left_out(tmp_path: Path) -> None:
    lengths = [{"arrival": n, "prompt": n % 2 * n, "output": 1} for n in range(12)]
    path = write_jsonl(tmp_path / "t", lengths)
    assert prompts(path, "workload.limit=2", "seed=1", "workload.zero_length=skip") == [5, 7]


def test_past_the_last_window_a_seed_is_a_resample_and_says_so(tmp_path: Path) -> None:
    path = write_steady(tmp_path / "t", 1000)
    workload = trace_workload(path, "workload.limit=400", "seed=2")
    requests = list(workload.requests())
    assert len(requests) == 400
    assert requests[0].arrival == 0
    assert "resample 2: 400 rows in blocks of 12, drawn with replacement from 1000" in workload.description


def test_without_a_limit_a_seed_above_0_resamples_the_whole_trace(tmp_path: Path) -> None:
    path = write_steady(tmp_path / "t", 640)
    drawn = prompts(path, "seed=1")
    assert len(drawn) == 640
    assert drawn != prompts(path)
    assert drawn == prompts(path, "seed=1")


def test_a_resample_keeps_gaps_and_lengths_together_and_blocks_whole() -> None:
    source = rows(3200)
    drawn = list(select(lambda: iter(source), seed=5, limit=None).requests())
    assert np.allclose(np.diff([one.arrival for one in drawn]), 1.0)
    steps = np.diff([one.num_prompt_tokens for one in drawn])
    assert (steps == 1).mean() > 0.95


def test_a_resample_has_the_traces_means() -> None:
    original = list(preset("azure_conv").requests())
    drawn = [list(preset("azure_conv", f"seed={seed}").requests()) for seed in range(1, 3)]
    mean = np.mean([one.num_prompt_tokens for run in drawn for one in run])
    assert mean == pytest.approx(np.mean([one.num_prompt_tokens for one in original]), rel=0.05)
    assert np.mean([run[-1].arrival for run in drawn]) == pytest.approx(original[-1].arrival, rel=0.05)


def test_a_second_copy_of_a_block_shares_neither_prompts_nor_sessions_with_the_first(tmp_path: Path) -> None:
    lines = [{"arrival": n, "prompt": 600, "output": 1, "session": f"s{n}", "hash_ids": [n, n]} for n in range(64)]
    drawn = list(trace_workload(write_jsonl(tmp_path / "t", lines), "seed=1").requests())
    assert len({one.session for one in drawn}) == len(drawn) == 64
    assert len({(one.content or ())[0].content for one in drawn}) == 64
    assert all(0 <= part.content < 2**63 for one in drawn for part in one.content or ())


def test_too_few_rows_to_resample_is_an_error_that_says_what_there_is(tmp_path: Path) -> None:
    path = write_steady(tmp_path / "t", 10)
    with pytest.raises(ConfigError, match="seed=3: the trace has 10 rows, which is 2 windows"):
        trace_workload(path, "workload.limit=4", "seed=3")
    with pytest.raises(ConfigError, match=f"seed={2**63 - 1}: the trace has 10 rows"):
        trace_workload(path, "workload.limit=4", f"seed={2**63 - 1}")


@given(num_rows=st.integers(32, 400), limit=st.integers(1, 450), seeds=st.sets(st.integers(0, 2000), min_size=2))
def test_no_two_seeds_give_the_same_requests(num_rows: int, limit: int, seeds: set[int]) -> None:
    source = rows(num_rows)
    seen: set[tuple[int, ...]] = set()
    for seed in seeds:
        try:
            selection = select(lambda: iter(source), seed=seed, limit=limit)
        except ConfigError:
            continue
        drawn = list(selection.requests())
        arrivals = [one.arrival for one in drawn]
        assert arrivals == sorted(arrivals)
        assert len(drawn) == min(limit, num_rows)
        key = tuple(one.num_prompt_tokens for one in drawn)
        assert key not in seen
        seen.add(key)
