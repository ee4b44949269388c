"""benchmarks/serve.py with our own client: it runs to its end, and what both sides count is the same."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "serve.py"
OURS = ("--only", "tokenyard", "--client", "tokenyard")
SMALL = ("--num-prompts", "5", "--input-len", "16", "--output-len", "8", "--max-model-len", "64")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_our_server_is_measured_at_each_rate_in_each_round(tiny_llama_dir: Path) -> None:
    done = run(*OURS, *SMALL, "--model", str(tiny_llama_dir), "--rounds", "2", "--rates", "inf", "50")
    assert done.returncode == 0, done.stderr
    *_, line = done.stdout.splitlines()
    report = json.loads(line)
    assert report["shape"] == "5x16+8"
    assert {rate: len(rounds) for rate, rounds in report["rounds"]["tokenyard"].items()} == {"inf": 2, "50": 2}
    assert all(figure > 0 for row in report["medians"]["tokenyard"].values() for figure in row.values())
    assert len(report["ready_s"]["tokenyard"]) == 2


@pytest.mark.parametrize(
    ("arguments", "said"),
    [((), "--vllm is needed"), ((*OURS, "--rounds", "0"), "--rounds, --num-prompts, --input-len and --output-len")],
)
def test_a_mistake_is_told_before_anything_starts(arguments: tuple[str, ...], said: str) -> None:
    done = run("--model", "m", *arguments)
    assert done.returncode == 2
    assert said in done.stderr
