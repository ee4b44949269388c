"""The Chrome trace: JSON that ui.perfetto.dev and chrome://tracing take, with a track a request."""

from __future__ import annotations

import json
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tokenyard.testing import EngineHarness
from traced_runs import base_config, drive, harness, traced, with_sizes

REQUESTS, ENGINE = 2, 1
LIMITS = {
    "scheduler": {"max_num_seqs": 3, "max_num_batched_tokens": 12},
    "kv_cache": {"num_blocks": 10, "block_size": 4},
}


def events_of(path: Path) -> list[dict[str, Any]]:
    events = json.loads(path.read_text())
    assert isinstance(events, list)
    return events


def slices(events: list[dict[str, Any]]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """By track, in the order of the file."""
    tracks = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
    return tracks


@pytest.mark.parametrize("loop", ["sync", "overlap"])
@pytest.mark.parametrize("seed", range(5))
def test_what_happened_is_drawn_by_the_rules_of_the_format(tmp_path: Path, loop: str, seed: int) -> None:
    path = tmp_path / "chrome.json"
    with harness(traced(with_sizes(base_config(f"engine={loop}"), LIMITS), None, path)) as engine:
        drive(engine, seed, num_turns=50)
        num_steps, num_requests = engine.stats.num_steps, len(engine.requests)
    events = events_of(path)
    assert {event["ph"] for event in events} <= {"M", "X", "C"}
    for event in events:
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0
    for track in slices(events).values():
        times = [(event["ts"], event["ts"] + event["dur"]) for event in track]
        assert all(event["dur"] >= 0 for event in track)
        for (_, end), (begin, _) in pairwise(times):
            assert begin >= end - 0.01, "slices of one track lie one after the other"
    names = [event["args"]["name"] for event in events if event["name"] == "thread_name" and event["pid"] == REQUESTS]
    assert len(names) == num_requests
    steps = [event for event in events if event["ph"] == "X" and event["pid"] == ENGINE]
    assert len(steps) == num_steps


def drawn(path: Path, name: str) -> list[tuple[str, float, float]]:
    """The slices of a request: what, from when to when, in milliseconds."""
    events = events_of(path)
    track = next(
        event["tid"]
        for event in events
        if event["name"] == "thread_name" and event["pid"] == REQUESTS and event["args"]["name"] == name
    )
    return [
        (event["name"], round(event["ts"] / 1000, 3), round((event["ts"] + event["dur"]) / 1000, 3))
        for event in slices(events)[REQUESTS, track]
    ]


@pytest.fixture
def engine(tmp_path: Path) -> EngineHarness:
    return harness(traced(with_sizes(base_config(), LIMITS), None, tmp_path / "chrome.json"))


def test_a_long_decode_is_one_slice(tmp_path: Path, engine: EngineHarness) -> None:
    engine.add([1, 2, 3], "a", max_tokens=20)
    engine.run()
    engine.close()
    assert drawn(tmp_path / "chrome.json", "a") == [
        ("waiting", 0.0, 0.0),
        ("prefill", 0.0, 10.0),
        ("decoding", 10.0, 200.0),
    ]


def test_each_chunk_of_a_prompt_is_one(tmp_path: Path, engine: EngineHarness) -> None:
    engine.add(list(range(1, 31)), "a", max_tokens=1)
    engine.run()
    engine.close()
    whats = [what for what, _, _ in drawn(tmp_path / "chrome.json", "a")]
    assert whats == ["waiting", "prefill", "prefill", "prefill"]


def test_a_preempted_request_shows_that_it_waits_again(tmp_path: Path, engine: EngineHarness) -> None:
    for name in ("a", "b", "c"):
        engine.add([1, 2, 3, 4, 5, 6, 7, ord(name) - 90], name, max_tokens=16)
    engine.run()
    engine.close()
    assert engine.stats.num_preemptions
    whats = [what for what, _, _ in drawn(tmp_path / "chrome.json", "c")]
    assert whats[:5] == ["waiting", "prefill", "decoding", "preempted", "prefill"]


def test_what_is_open_at_the_end_is_drawn_to_the_end(tmp_path: Path, engine: EngineHarness) -> None:
    engine.add([1, 2, 3], "a", max_tokens=20)
    for _ in range(4):
        engine.step()
    engine.core.shutdown()
    assert drawn(tmp_path / "chrome.json", "a")[-1] == ("decoding", 10.0, 40.0)


def test_without_its_end_it_still_loads(tmp_path: Path, engine: EngineHarness) -> None:
    """As the viewers do it: the array format needs no closing bracket."""
    engine.add([1, 2, 3], "a", max_tokens=4)
    engine.run()
    text = (tmp_path / "chrome.json").read_text()
    assert json.loads(text.rstrip().rstrip(",") + "]")
    engine.close()


def test_counters_tell_how_many_run_and_wait_and_what_is_free(tmp_path: Path, engine: EngineHarness) -> None:
    for number in range(5):
        engine.add([1, 2, number + 1], max_tokens=4)
    engine.run()
    engine.close()
    counters = [event for event in events_of(tmp_path / "chrome.json") if event["ph"] == "C"]
    assert {event["name"] for event in counters} == {"requests", "free blocks"}
    assert {"running": 3, "waiting": 2} in [event["args"] for event in counters]


def test_nobody_is_counted_while_nothing_runs_nor_at_the_end(tmp_path: Path, engine: EngineHarness) -> None:
    for _ in range(2):
        engine.add([1, 2, 3], max_tokens=2)
        engine.run()
    engine.add([1, 2, 3], max_tokens=9)
    engine.step()
    engine.close()
    counters = [event for event in events_of(tmp_path / "chrome.json") if event["name"] == "requests"]
    assert [event["args"]["running"] for event in counters] == [1, 0, 1, 0, 1, 0]
