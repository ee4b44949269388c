"""benchmarks/sim_vs_live.py: medians over its rounds, and when a bar is missed."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
from tokenyard.latency_fit import Errors

ERRORS = Errors(num_steps=1, mean=0.0, median=0.0, total=0.0)


@pytest.fixture
def bench(script: Callable[[str], ModuleType]) -> Any:
    return script("sim_vs_live")


def a_round(bench: Any, simulated: float, policies: dict[str, float]) -> Any:
    """Everything takes a second live, and `simulated` seconds simulated."""
    load = {"live": bench.Means(1.0, 1.0, 1.0), "simulated": bench.Means(1.0, simulated, 1.0)}
    live = {"sjf": 1.0, "fcfs": 2.0}
    return bench.Round(load=load, policies={"live": live, "simulated": policies}, in_sample=ERRORS, held_out=ERRORS)


def test_the_median_of_the_rounds_counts_and_not_the_worst(bench: Any) -> None:
    rounds = [a_round(bench, seconds, {"sjf": 1.0, "fcfs": 3.0}) for seconds in (1.05, 9.0, 0.95)]
    verdict = bench.Verdict(0.6, 1.0, rounds)
    assert verdict.errors == pytest.approx({"ttft": 0.0, "tpot": 0.05, "e2e": 0.0})
    assert verdict.is_near
    assert verdict.is_same_order
    assert len(verdict.row()["rounds"]) == 3


def test_a_mean_too_far_off_and_another_order_are_misses(bench: Any) -> None:
    verdict = bench.Verdict(0.6, 1.0, [a_round(bench, 0.89, {"sjf": 2.0, "fcfs": 1.0})])
    assert not verdict.is_near
    assert not verdict.is_same_order


def test_requests_of_one_token_have_no_time_per_token(bench: Any, capsys: pytest.CaptureFixture[str]) -> None:
    class Table:
        def __init__(self) -> None:
            import numpy as np

            self.arrival = np.array([0.0, 1.0])
            self.first_token = np.array([1.0, 3.0])
            self.finish = np.array([1.0, 7.0])
            self.output = np.array([1, 5])

    means = bench.means_of(Table())
    assert means == bench.Means(ttft=1.5, tpot=1.0, e2e=3.5)
    bench.Verdict(0.6, 1.0, [a_round(bench, 1.0, {"sjf": 1.0, "fcfs": 2.0})]).print_tables()
    assert "| tpot | 1000.0 ms | 1000.0 ms | +0.0% |" in capsys.readouterr().out
