"""Each format of `workload=trace`, read from files as people have them."""

from __future__ import annotations

import gzip
import logging
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from tokenyard.interfaces.workload import Segment, WorkloadRequest
from tokenyard.testing import WorkloadContract
from trace_workloads import trace_requests, trace_workload, write_jsonl, write_servegen, write_steady

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:46.6805901,396,1"
BURSTGPT = (
    "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
    "5,,1.0,ChatGPT,472,18,490,API log\n"
    "45.5,s-1,2.0,GPT-4,1087,0,1087,Conversation log\n"
    "118,s-2,2.0,GPT-4,417,276,693,Conversation log\n"
)


class TestTrace(WorkloadContract):
    overrides = ("workload=azure_conv", "workload.limit=300")
    long = ("workload.limit=20000",)


class TestHashedTrace(WorkloadContract):
    overrides = ("workload=mooncake_conversation", "workload.limit=300")


class TestServeGenTrace(WorkloadContract):
    overrides = ("workload=servegen", "workload.limit=300", "workload.rate_scale=0.001")
    long = ("workload.limit=20000",)


def written(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def shape(requests: list[WorkloadRequest]) -> list[tuple[float, int, int]]:
    return [(one.arrival, one.num_prompt_tokens, one.num_output_tokens) for one in requests]


def test_azure_times_are_exact_to_the_last_digit_and_begin_at_the_first_row(tmp_path: Path) -> None:
    assert shape(trace_requests(written(tmp_path, "t.csv", AZURE))) == [(0.0, 374, 44), (1e-7, 396, 1)]


def test_azure_2024_times_with_a_zone_and_without_a_fraction_are_read(tmp_path: Path) -> None:
    rows = "2024-05-10 00:00:00.009930+00:00,2162,5\n2024-05-10 01:00:01+01:00,2399,6\n"
    path = written(tmp_path, "t.csv", f"TIMESTAMP,ContextTokens,GeneratedTokens\n{rows}")
    assert shape(trace_requests(path)) == [(0.0, 2162, 5), (0.99007, 2399, 6)]


@pytest.mark.parametrize(
    "content",
    [
        AZURE.encode("utf-8-sig"),
        AZURE.replace("\n", "\r\n").encode(),
        f"{AZURE}\n\n".encode(),
        gzip.compress(AZURE.encode()),
        AZURE.replace("GeneratedTokens", "GeneratedTokens,More").replace(",44", ",44,x").replace(",1", ",1,y").encode(),
    ],
    ids=["BOM", "CRLF", "blank line", "gzip", "further column"],
)
def test_how_a_file_is_packed_and_what_else_is_in_it_does_not_matter(tmp_path: Path, content: bytes) -> None:
    if b"More" in content:
        content = b"TIMESTAMP,More,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,x,374,44\n"
        content += b"2023-11-16 18:15:46.6805901,y,396,1\n"
    assert shape(trace_requests(written(tmp_path, "t", content))) == [(0.0, 374, 44), (1e-7, 396, 1)]


def test_burstgpt_leaves_failures_out_and_says_how_many(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    workload = trace_workload(written(tmp_path, "t.csv", BURSTGPT))
    with caplog.at_level(logging.WARNING):
        requests = list(workload.requests())
    assert shape(requests) == [(0.0, 472, 18), (113.0, 417, 276)]
    assert [one.session for one in requests] == [None, "s-2"]
    assert "left out 1 without output, which failed" in workload.description
    assert "1 without output" in caplog.text


def test_mooncake_hashes_are_512_tokens_and_the_last_one_what_is_left(tmp_path: Path) -> None:
    row = {"timestamp": 27482, "input_length": 1100, "output_length": 52, "hash_ids": [46, 47, 2366]}
    workload = trace_workload(write_jsonl(tmp_path / "t", [row]))
    (request,) = list(workload.requests())
    assert (request.arrival, request.num_prompt_tokens, request.num_output_tokens) == (27.482, 1100, 52)
    assert request.content == [Segment(46, 512), Segment(47, 512), Segment(2366, 76)]
    assert workload.has_content


def test_jsonl_has_all_that_a_request_can_say(tmp_path: Path) -> None:
    full = {"arrival": 1.5, "prompt": 20, "output": 2, "client": "a", "session": "s", "priority": -3, "deadline": 2.5}
    rows = [{"arrival": 1, "prompt": 5, "output": 6, "client": None}, {**full, "hash_ids": [7, 8]}]
    workload = trace_workload(write_jsonl(tmp_path / "t", rows), "workload.tokens_per_hash=16")
    plain, rich = list(workload.requests())
    assert plain == WorkloadRequest(arrival=1.0, num_prompt_tokens=5, num_output_tokens=6)
    assert rich == WorkloadRequest(
        arrival=1.5,
        num_prompt_tokens=20,
        num_output_tokens=2,
        client="a",
        session="s",
        priority=-3,
        deadline=2.5,
        content=[Segment(7, 16), Segment(8, 4)],
    )
    assert workload.has_content


def test_jsonl_without_hashes_has_no_content(tmp_path: Path) -> None:
    assert not trace_workload(write_steady(tmp_path / "t", 3)).has_content


def test_rows_of_zero_length_are_left_out_on_demand(tmp_path: Path) -> None:
    rows = [{"arrival": n, "prompt": prompt, "output": 1} for n, prompt in enumerate((0, 4, 0, 5))]
    workload = trace_workload(write_jsonl(tmp_path / "t", rows), "workload.zero_length=skip")
    assert shape(list(workload.requests())) == [(1.0, 4, 1), (3.0, 5, 1)]
    assert "left out 2 of zero length" in workload.description


def test_longer_requests_are_left_out_on_demand(tmp_path: Path) -> None:
    workload = trace_workload(write_steady(tmp_path / "t", 10), "workload.max_request_tokens=5")
    assert [one.num_prompt_tokens for one in workload.requests()] == [1, 2]
    assert "left out 8 longer than" in workload.description


@pytest.mark.parametrize(("pattern", "shape_value", "variation"), [("Gamma", 0.25, 2.0), ("Weibull", 0.5, 5**0.5)])
def test_servegen_windows_have_their_rate_and_burstiness(
    tmp_path: Path, pattern: str, shape_value: float, variation: float
) -> None:
    requests = trace_requests(write_servegen(tmp_path, "one", rate=20.0, pattern=pattern, shape=shape_value))
    arrivals = np.array([one.arrival for one in requests])
    gaps = np.diff(arrivals[arrivals < 600])
    assert len(requests) == pytest.approx(2 * 600 * 20, rel=0.06)
    assert not ((arrivals >= 600) & (arrivals < 1200)).any()
    assert arrivals.max() < 1800
    assert gaps.std() / gaps.mean() == pytest.approx(variation, rel=0.1)


def test_a_servegen_gap_goes_on_after_a_silent_window(tmp_path: Path) -> None:
    """A gap of 417 s that begins at 417 has 183 s before the silence and 233 s after it."""
    requests = trace_requests(write_servegen(tmp_path, "one", rate=0.0024, shape=1e6))
    assert [one.arrival for one in requests] == pytest.approx([417, 1433], abs=5)


def test_servegen_lengths_are_drawn_from_their_distributions(tmp_path: Path) -> None:
    requests = trace_requests(write_servegen(tmp_path, "one", rate=5.0))
    prompts = [one.num_prompt_tokens for one in requests]
    assert set(prompts) == {10, 20}
    assert np.mean(prompts) == pytest.approx(17.5, rel=0.02)
    assert {one.num_output_tokens for one in requests} == {7}


def test_a_servegen_folder_is_all_its_clients_in_order_of_time(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write_servegen(tmp_path, name)
    requests = trace_requests(tmp_path, "workload.rate_scale=0.5")
    arrivals = [one.arrival for one in requests]
    assert arrivals == sorted(arrivals)
    assert {one.client for one in requests} == {"a", "b"}
    assert len(requests) == pytest.approx(2 * 2 * 600 * 2 * 0.5, rel=0.15)


def test_a_servegen_seed_is_another_draw(tmp_path: Path) -> None:
    path = write_servegen(tmp_path, "one")
    assert trace_requests(path) == trace_requests(path)
    assert shape(trace_requests(path, "seed=1")) != shape(trace_requests(path))


def test_a_text_of_lengths_is_never_run(tmp_path: Path) -> None:
    path = write_servegen(tmp_path, "one")
    target = tmp_path / "pwned"
    text = f"{{1: open({str(target)!r}, 'w')}}"
    write_jsonl(tmp_path / "one-dataset.json", [{"600": {"input_tokens": text, "output_tokens": text}}])
    with pytest.raises(ValueError, match="column 'input_tokens'"):
        trace_requests(path)
    assert not target.exists()


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    peaks = []
    for num_rows in (2_000, 20_000):
        workload = trace_workload(write_steady(tmp_path / f"{num_rows}", num_rows), "workload.limit=1000", "seed=1")
        trace_requests(tmp_path / f"{num_rows}", "seed=3")
        tracemalloc.start()
        assert sum(1 for _ in workload.requests()) == 1000
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 2**18
