"""benchmarks/soak.py: it runs to its end, finds what it should find, and says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "soak.py"
Import = Callable[[str], ModuleType]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


def bars_of(done: subprocess.CompletedProcess[str]) -> dict[str, float]:
    """What was found, by bar; growth and latency are left out: a short run of a busy machine says nothing of them."""
    found = json.loads(done.stdout.splitlines()[-1])["bars"]
    return {name: bar["found"] for name, bar in found.items() if "growth" not in name and "p99" not in name}


@pytest.mark.slow
def test_2_3_25_mixed_load_is_answered_and_leaves_nothing_behind() -> None:
    done = run("--minutes", "0.25", "--idle-every", "150")
    assert done.returncode in (0, 1), done.stderr
    assert set(bars_of(done).values()) == {0}, done.stdout
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["requests"] >= 150
    assert {f"growth of {name}, MiB/1000" for name in ("api", "engine")} < set(report["bars"])


@pytest.mark.slow
def test_answers_that_are_not_the_references_are_a_missed_bar() -> None:
    done = run("--minutes", "0.1", "--idle-every", "100", "model.dtype=bfloat16")
    assert done.returncode == 1, done.stderr
    assert bars_of(done)["answers that are wrong"] > 0
    assert "greedy decoding gave" in done.stdout


def point(script: Import, at: float, num_requests: int, rss: float) -> object:
    use = {"api": script("server_process").Use(rss=rss, cpu=0.0, num_files=3, num_threads=1)}
    return script("soak_watch").IdlePoint(at, num_requests, use, 1)


def test_growth_is_of_the_time_after_the_warm_up(script: Import) -> None:
    rss = [100.0, 300.0, *(301.0 + 2 * i for i in range(8))]
    points = [point(script, 10.0 * i, 1000 * i, size) for i, size in enumerate(rss)]
    assert script("soak").growth(points) == {"api": 2.0}


def test_growth_of_a_process_that_came_or_went_is_not_told(script: Import) -> None:
    points = [point(script, 10.0 * i, 1000 * i, 5.0) for i in range(5)]
    other = script("soak_watch").IdlePoint(50.0, 5000, {}, 1)
    assert script("soak").growth([*points, other]) == {}


def test_latency_compares_the_last_quarter_with_the_first_after_the_warm_up(script: Import) -> None:
    gaps = [(float(at), 9.0 if at < 20 else 1.0 if at < 60 else 3.0) for at in range(101)]
    assert script("soak").latencies(gaps) == (1.0, 3.0)
    assert script("soak").latencies([]) == (0.0, 0.0)


@pytest.mark.parametrize("wrong", [("--minutes", "0"), ("--concurrency", "0"), ("--idle-every", "-1")])
def test_a_mistake_is_told_before_anything_starts(wrong: tuple[str, ...]) -> None:
    done = run(*wrong)
    assert done.returncode == 2
    assert "numbers above 0" in done.stderr
