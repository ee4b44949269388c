"""benchmarks/server_start.py and server_throughput.py: they run to their ends and count what they say."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SMALL = ("kv_cache.num_blocks=64",)
Import = Callable[[str], ModuleType]


def run(script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(BENCHMARKS / script), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_a_start_has_its_phases_and_imports_no_torch_into_the_api_process(tiny_llama_dir: Path) -> None:
    done = run("server_start.py", "--runs", "2", str(tiny_llama_dir), *SMALL)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert 0 < report["startupz_s"] < report["readyz_s"]
    assert report["must_not_be_imported"] == []
    assert report["imports_ms"] > 0
    assert set(report["cpu_s"]) == {"api", "engine"}
    assert all(second > 0 for second in report["phases_s"].values())


@pytest.mark.slow
def test_both_sides_generate_the_same_number_of_tokens_in_each_round(tiny_llama_dir: Path) -> None:
    shape = ("--shapes", "3x8+16", "--rounds", "2", "--threads", "1")
    done = run("server_throughput.py", *shape, "--model", str(tiny_llama_dir), *SMALL, "model.max_model_len=64")
    assert done.returncode == 0, done.stderr
    (row,) = json.loads(done.stdout.splitlines()[-1])["rows"]
    assert (row["shape"], row["threads"], len(row["ratios"])) == ("3x8+16", 1, 2)
    assert row["events"] <= 3 * 17
    assert min(row["llm_tokens_per_s"], row["server_tokens_per_s"], row["ratio"]) > 0


@pytest.mark.parametrize(
    ("script", "wrong", "said"),
    [
        ("server_start.py", ("--runs", "0"), "--runs takes a number above 0"),
        ("server_throughput.py", ("--rounds", "0"), "take numbers above 0"),
        ("server_throughput.py", ("--shapes", "8x8"), "is no shape"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(script: str, wrong: tuple[str, ...], said: str) -> None:
    done = run(script, *wrong)
    assert done.returncode == 2
    assert said in done.stderr


def test_imports_are_added_up_by_package_and_other_lines_passed_over(script: Import) -> None:
    log = (
        "import time: self [us] | cumulative | imported package\n"
        "import time:      1500 |       1500 |   fastapi.routing\n"
        "INFO: listening\n"
        "import time:       500 |       2000 | fastapi\n"
        "import time:      3000 |       3000 |     zmq\n"
    )
    assert list(script("server_start").by_package(log).items()) == [("zmq", 3.0), ("fastapi", 2.0)]


def test_the_ratio_is_of_pairs_of_one_round_and_only_one_thread_has_a_bar(script: Import) -> None:
    module = script("server_throughput")
    others = {"llm_cpu_s": 1.0, "engine_cpu_s": 1.0, "api_cpu_s": 1.0, "client_cpu_s": 1.0, "events": 1}
    llm = [{"tokens_per_s": rate, **others} for rate in (100.0, 200.0, 400.0)]
    server = [{"tokens_per_s": rate, **others} for rate in (90.0, 160.0, 360.0)]
    rows = [module.compared(module.Case("1x1+1", threads), {"llm": llm, "server": server}) for threads in (1, 2)]
    assert [row["ratio"] for row in rows] == [0.9, 0.9]
    assert [row["meets_bar"] for row in rows] == [True, None]
