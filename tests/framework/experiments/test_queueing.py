"""Simulations of one server agree with queueing theory: Pollaczek-Khinchine, Cobham, Schrage, processor sharing."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import numpy as np
import pytest
from tokenyard import simulate

SHORT, LONG = 0.1, 1.0  # seconds of service: 10 and 100 steps of 0.01
SHARE_SHORT = 0.9
RATE = 0.5 / (SHARE_SHORT * SHORT + (1 - SHARE_SHORT) * LONG)  # rho = 0.5
SEEDS = (1, 2, 3)
LONG_RUN = 20_000  # requests
LENGTHS = (
    f"workload.rate={RATE}",
    "workload.prompt=1",
    "workload.output={kind: mixture, values: [10, 100], weights: [0.9, 0.1]}",
)
SECOND_MOMENT = SHARE_SHORT * SHORT**2 + (1 - SHARE_SHORT) * LONG**2
LOAD_SHORT = RATE * SHARE_SHORT * SHORT
RESIDUAL = RATE * SECOND_MOMENT / 2


def pollaczek_khinchine() -> float:
    """Mean response of M/G/1 in order of arrival."""
    return SHARE_SHORT * SHORT + (1 - SHARE_SHORT) * LONG + RESIDUAL / (1 - 0.5)


def cobham() -> float:
    """Mean response of M/G/1, the shorter of the waiting first, nobody displaced (Cobham 1954)."""
    short = RESIDUAL / (1 - LOAD_SHORT)
    long = RESIDUAL / ((1 - LOAD_SHORT) * (1 - 0.5))
    return SHARE_SHORT * (SHORT + short) + (1 - SHARE_SHORT) * (LONG + long)


def schrage() -> float:
    """Mean response of M/G/1 under SRPT (Schrage and Miller 1966); times of service are two numbers.

    Wait of a size: what is at most as long, residuals of longer ones included, over (1 - rho)^2 of shorter ones and of
    those up to it; the residence: the integral of 1 / (1 - rho(t)) up to the size. A request may not be displaced by
    one of the same size, so rho up to a size counts that size for the wait, and shorter ones alone for the residence.
    """
    rate_short, rate_long = RATE * SHARE_SHORT, RATE * (1 - SHARE_SHORT)
    wait_short = (rate_short * SHORT**2 + rate_long * SHORT**2) / (2 * (1 - LOAD_SHORT))
    wait_long = RATE * SECOND_MOMENT / (2 * (1 - LOAD_SHORT) * (1 - 0.5))
    stay_long = SHORT + (LONG - SHORT) / (1 - LOAD_SHORT)
    return SHARE_SHORT * (wait_short + SHORT) + (1 - SHARE_SHORT) * (wait_long + stay_long)


def run(seed: int, count: int, *overrides: str) -> dict[str, np.ndarray]:
    """The request columns of a simulation."""
    columns = simulate(
        ["workload=synthetic", f"workload.num_requests={count}", f"seed={seed}", *LENGTHS, *overrides],
        keep_steps=False,
    ).requests
    return {name: columns[name] for name in ("arrival", "finish", "output")}


def runs(count: int, *overrides: str) -> list[dict[str, np.ndarray]]:
    """One for each seed, two at a time where they are long: each takes a core for a minute."""
    if count < LONG_RUN:
        return [run(seed, count, *overrides) for seed in SEEDS]
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn")) as pool:
        return [job.result() for job in [pool.submit(run, seed, count, *overrides) for seed in SEEDS]]


def mean_response(count: int, *overrides: str) -> float:
    """Over all seeds."""
    found = runs(count, "latency=constant", "latency.per_step=0.01", "scheduler.max_num_seqs=1", *overrides)
    return float(np.mean([np.mean(columns["finish"] - columns["arrival"]) for columns in found]))


def test_the_formulas_agree_with_what_is_known() -> None:
    assert pollaczek_khinchine() == pytest.approx(0.4768, abs=1e-4)
    assert cobham() == pytest.approx(0.3969, abs=2e-4)
    assert schrage() == pytest.approx(0.2710, abs=1e-4)


POLICIES = {
    "fcfs": ((), pollaczek_khinchine),
    "sjf": (("scheduler=sjf", "scheduler.predictor=oracle"), cobham),
    "srpt": (("scheduler=srpt", "scheduler.predictor=oracle", "scheduler.preempt_mode=pause"), schrage),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_short_run_is_near_theory(policy: str) -> None:
    overrides, theory = POLICIES[policy]
    assert mean_response(1500, *overrides) == pytest.approx(theory(), rel=0.25)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
def test_the_mean_response_is_that_of_theory(policy: str) -> None:
    overrides, theory = POLICIES[policy]
    assert mean_response(50_000, *overrides) == pytest.approx(theory(), rel=0.04)


def slowdowns(count: int) -> dict[int, float]:
    """Mean slowdown by output length, over all seeds, when all that are there share the server."""
    means: dict[int, list[float]] = {10: [], 100: []}
    for found in runs(count, "latency=shared", "latency.per_request=0.01", "scheduler.max_num_seqs=1024"):
        slowdown = (found["finish"] - found["arrival"]) / (0.01 * found["output"])
        for length, values in means.items():
            values.append(float(slowdown[found["output"] == length].mean()))
    return {length: float(np.mean(values)) for length, values in means.items()}


@pytest.mark.slow
def test_shared_steps_slow_all_sizes_down_alike_as_processor_sharing_does() -> None:
    for slowdown in slowdowns(50_000).values():
        assert slowdown == pytest.approx(1 / (1 - 0.5), rel=0.08)
