"""How much was done, in what time, and how full the engine was."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.experiments.metrics_latency import is_finished
from tokenyard.experiments.metrics_statistics import finite, ratio
from tokenyard.experiments.records import RequestStatus

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tokenyard.experiments.metrics_statistics import Flags
    from tokenyard.experiments.records import RequestTable, RunRecord, RunTotals


def counts(requests: RequestTable) -> dict[str, int]:
    """Requests by how they ended."""
    number = np.bincount(requests.status, minlength=len(RequestStatus))
    return {"total": len(requests)} | {status.name.lower(): int(number[status]) for status in RequestStatus}


def duration(requests: RequestTable) -> float | None:
    """Seconds from the first arrival to the last completion of a request; None where none finished."""
    done = is_finished(requests)
    if not done.any():
        return None
    return float(requests.finish.max(where=done, initial=-np.inf) - requests.arrival.min())


def throughput(requests: RequestTable) -> dict[str, object]:
    """Of finished requests: 100 of 50 prompt and 10 output tokens in 20 s are 5 requests, 300 tokens a second."""
    done, seconds = is_finished(requests), duration(requests)
    num_prompt, num_output = _sum(requests.prompt, done), _sum(requests.output, done)
    return {
        "duration": seconds,
        "makespan": _makespan(requests),
        "request_rate": _request_rate(requests),
        "request_throughput": ratio(int(done.sum()), seconds),
        "output_throughput": ratio(num_output, seconds),
        "total_token_throughput": ratio(num_prompt + num_output, seconds),
    }


def usage(record: RunRecord, max_num_batched_tokens: int | None) -> dict[str, object]:
    """What steps, K/V blocks and the token budget were used for; None for what a target does not tell."""
    totals, requests = record.totals, record.requests
    makespan = _makespan(requests)
    return {
        "num_steps": totals.num_steps,
        "batch_size": totals.mean_batch_size,
        "busy_seconds": totals.busy_seconds,
        "utilisation": ratio(totals.busy_seconds, makespan),
        "kv_usage": {"mean": totals.mean_kv_usage, "max": totals.max_kv_usage},
        "budget_usage": {"mean": totals.mean_budget_usage, "full": _full_steps(record, max_num_batched_tokens)},
        "scheduler_seconds": totals.scheduler_seconds,
        **_preemptions(requests, totals),
        "hit_rate": _hit_rate(requests, totals),
    }


def deadlines(requests: RequestTable) -> dict[str, object]:
    """A deadline is met by a request that finished, not after it."""
    has = ~np.isnan(requests.deadline)
    met = int(np.count_nonzero(has & is_finished(requests) & (requests.finish <= requests.deadline)))
    total = int(np.count_nonzero(has))
    return {"total": total, "missed": total - met, "miss_rate": ratio(total - met, total)}


def _makespan(requests: RequestTable) -> float | None:
    """The last end, however it came, since the start of the workload (C_max of scheduling theory)."""
    return finite(float(np.fmax.reduce(requests.finish, initial=np.nan)))


def _request_rate(requests: RequestTable) -> float | None:
    """Arrivals a second: N arrivals have N - 1 times between them."""
    if len(requests) < 2:
        return None
    return ratio(len(requests) - 1, float(requests.arrival.max() - requests.arrival.min()))


def _full_steps(record: RunRecord, max_num_batched_tokens: int | None) -> float | None:
    """Share of the steps that used their whole token budget."""
    steps = record.steps
    if steps is None or max_num_batched_tokens is None:
        return None
    full = np.count_nonzero(steps.prefill_tokens + steps.decode_tokens >= max_num_batched_tokens)
    return ratio(int(full), len(steps))


def _preemptions(requests: RequestTable, totals: RunTotals) -> dict[str, object]:
    known = totals.num_preemptions is not None
    return {
        "num_preemptions": totals.num_preemptions,
        "preemptions_per_request": ratio(totals.num_preemptions, len(requests)),
        "max_preemptions": int(requests.preemptions.max(initial=0)) if known else None,
        "recomputed_tokens": int(requests.recomputed.sum()) if known else None,
        "recompute_tax": ratio(float(requests.recomputed.sum()), totals.num_computed_tokens),
    }


def _hit_rate(requests: RequestTable, totals: RunTotals) -> float | None:
    """Prompt tokens that the prefix cache had / prompt tokens, of requests that were admitted, at the first admission.

    What a preempted request finds again when it comes back counts neither as asked for nor as had. None where a target
    tells nothing of its cache.
    """
    if totals.num_computed_tokens is None and not requests.cached.any():
        return None
    admitted = ~np.isnan(requests.first_scheduled) | is_finished(requests)
    return ratio(_sum(requests.cached, admitted), _sum(requests.prompt, admitted))


def _sum(tokens: NDArray[np.int32], of: Flags) -> int:
    return int(tokens.sum(where=of, dtype=np.int64))
