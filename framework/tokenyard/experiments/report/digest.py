"""What pictures need of a run, in a few thousand numbers: a run itself may have millions of rows."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tokenyard.experiments.metrics_latency import tpot, ttft
from tokenyard.experiments.metrics_service import client_totals, clients_of, served_by

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tokenyard.experiments.records import RequestTable, RunRecord, StepTable

LEVELS = np.linspace(0.0, 1.0, 401)
"""Levels of the quantiles that are kept."""
NUM_TIMES = 241
GANTT_REQUESTS = 32
MAX_CLIENTS = 6  # that have a line of their own


@dataclass(frozen=True, slots=True)
class Service:
    """Service that clients have got by each time, in tokens, those of outputs counted twice, as in the paper on VTC."""

    times: NDArray[np.float64]  # [T] seconds
    clients: tuple[str, ...]  # [C] those that got most, most first
    tokens: NDArray[np.float64]  # [C, T]
    num_others: int


@dataclass(frozen=True, slots=True)
class Gantt:
    """Requests that arrived one after the other, where most did so in the shortest time. Seconds; NaN = never."""

    ids: NDArray[np.int64]  # [R]
    arrival: NDArray[np.float64]
    first_scheduled: NDArray[np.float64]
    first_token: NDArray[np.float64]
    finish: NDArray[np.float64]
    preemptions: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Load:
    """Steps over time, in bins of equal length. NaN = no step began in it."""

    times: NDArray[np.float64]  # [T] middles, seconds
    mean_blocks: NDArray[np.float64]  # [T]
    max_blocks: NDArray[np.float64]  # [T]
    mean_waiting: NDArray[np.float64]  # [T] requests


@dataclass(frozen=True, slots=True)
class Digest:
    """A run in small."""

    ttft: NDArray[np.float64]  # [LEVELS] quantiles, seconds; empty where no request has one
    tpot: NDArray[np.float64]
    arrival_rate: float | None  # requests a second; None where all arrive at once
    requests_key: str  # equal for runs of the same requests, whenever they came
    service: Service | None  # None without clients
    gantt: Gantt
    load: Load | None  # None without steps


def digest(record: RunRecord) -> Digest:
    """Takes a record apart, which can then be dropped."""
    table = record.requests
    return Digest(
        ttft=_quantiles(ttft(table)),
        tpot=_quantiles(tpot(table)),
        arrival_rate=_arrival_rate(table),
        requests_key=_requests_key(table),
        service=_service(table),
        gantt=_gantt(table),
        load=None if record.steps is None or not len(record.steps) else _load(record.steps),
    )


def _quantiles(values: NDArray[np.float64]) -> NDArray[np.float64]:
    known = values[~np.isnan(values)]
    return np.quantile(known, LEVELS) if len(known) else np.empty(0)


def _arrival_rate(table: RequestTable) -> float | None:
    if len(table) < 2:
        return None
    span = float(table.arrival.max() - table.arrival.min())
    return (len(table) - 1) / span if span > 0 else None


def _requests_key(table: RequestTable) -> str:
    """Of the prompts' lengths, in no order: which request is which depends on the policy where loops are closed."""
    return hashlib.sha256(np.sort(table.prompt).tobytes()).hexdigest()


def _service(table: RequestTable) -> Service | None:
    if len(table.clients) < 2:
        return None
    numbers, names = clients_of(table)
    first = np.argsort(-client_totals(table, numbers, len(names)), kind="stable")[:MAX_CLIENTS].tolist()
    ends = table.finish[np.isfinite(table.finish)]
    times = np.linspace(0.0, float(ends.max()) if len(ends) else 1.0, NUM_TIMES)
    tokens = np.stack([served_by(table, np.flatnonzero(numbers == number), times) for number in first])
    return Service(times, tuple(names[number] for number in first), tokens, len(names) - len(first))


def _gantt(table: RequestTable) -> Gantt:
    first = 0
    if len(table) > GANTT_REQUESTS:
        spans = table.arrival[GANTT_REQUESTS - 1 :] - table.arrival[: 1 - GANTT_REQUESTS]
        first = int(np.argmin(spans))
    rows = slice(first, first + GANTT_REQUESTS)
    return Gantt(
        ids=table.id[rows].copy(),  # a view would keep the whole column
        arrival=table.arrival[rows].copy(),
        first_scheduled=table.first_scheduled[rows].copy(),
        first_token=table.first_token[rows].copy(),
        finish=table.finish[rows].copy(),
        preemptions=table.preemptions[rows].copy(),
    )


def _load(steps: StepTable) -> Load:
    edges = np.linspace(float(steps.start[0]), float(steps.end[-1]), NUM_TIMES + 1)
    bins = np.clip(np.searchsorted(edges, steps.start, side="right") - 1, 0, NUM_TIMES - 1)
    count = np.bincount(bins, minlength=NUM_TIMES)
    most = np.full(NUM_TIMES, np.nan)
    np.fmax.at(most, bins, steps.used_blocks.astype(np.float64))

    def mean(values: NDArray[np.int32]) -> NDArray[np.float64]:
        sums = np.bincount(bins, weights=values, minlength=NUM_TIMES)
        return np.where(count > 0, sums / np.maximum(count, 1), np.nan)

    return Load((edges[:-1] + edges[1:]) / 2, mean(steps.used_blocks), most, mean(steps.waiting))
