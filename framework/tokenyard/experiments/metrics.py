"""run_metrics: what a run came to, from its record alone; docs/reference/metrics-of-experiments.md defines each."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tokenyard.experiments.metrics_fairness import EQUAL, fairness
from tokenyard.experiments.metrics_goodput import goodput, is_good
from tokenyard.experiments.metrics_groups import groupings
from tokenyard.experiments.metrics_latency import is_finished, latencies
from tokenyard.experiments.metrics_statistics import SUMMARY_KEYS, ratio, summary, weighted_summary
from tokenyard.experiments.metrics_throughput import counts, deadlines, duration, throughput, usage
from tokenyard.experiments.metrics_waiting import saturation, starvation

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from tokenyard.experiments.metrics_groups import Grouping
    from tokenyard.experiments.metrics_latency import AloneSeconds
    from tokenyard.experiments.records import RequestTable, RunRecord
    from tokenyard.experiments.slo import SLO

Groups = dict[str, dict[str, dict[str, object]]]


def run_metrics(
    record: RunRecord,
    slo: SLO,
    *,
    max_num_batched_tokens: int | None = None,
    kv_capacity_tokens: int | None = None,
    alone: AloneSeconds | None = None,
    client_weights: Mapping[str, float] = EQUAL,
) -> dict[str, object]:
    """Ready for JSON: times in seconds, None for what is not known or not defined.

    Without `alone` (see `alone_time`) there is no slowdown, without `max_num_batched_tokens` and kept steps no share
    of full steps; `kv_capacity_tokens` is VTC's M; fairness is judged by
    `client_weights`, 1 for who has none.
    """
    requests = record.requests
    parts = list(groupings(requests))
    groups = _groups(requests, slo, parts)
    times = _latency_summaries(requests, alone, parts, groups)
    return {
        "requests": counts(requests),
        **times,
        "itl": weighted_summary(record.gaps.seconds, record.gaps.counts),
        "itl_relative_error": record.gaps.relative_error,
        **throughput(requests),
        **goodput(requests, slo, duration(requests)),
        "deadlines": deadlines(requests),
        "fairness": fairness(requests, client_weights=client_weights, kv_capacity_tokens=kv_capacity_tokens),
        "starvation": starvation(requests),
        "saturation": saturation(requests, record.totals),
        **usage(record, max_num_batched_tokens),
        **groups,
    }


def _latency_summaries(
    requests: RequestTable, alone: AloneSeconds | None, parts: Sequence[Grouping], groups: Groups
) -> dict[str, object]:
    """Of all requests; those of the groups are put into `groups`. A column at a time, so that memory stays small."""
    found: dict[str, object] = {"slowdown": dict.fromkeys(SUMMARY_KEYS)}
    for name, column in latencies(alone).items():
        values = column(requests)
        for part in parts:
            for group, of_group in part.split(values):
                groups[part.key][group][name] = summary(of_group)
        found[name] = summary(values)  # which reorders them
    return found


def _groups(requests: RequestTable, slo: SLO, parts: Sequence[Grouping]) -> Groups:
    """Counts of each group; a kind of group that a run does not have is empty."""
    done = is_finished(requests)
    good = is_good(requests, slo) if slo.limits else None
    groups: Groups = {key: {} for key in ("by_client", "by_priority", "by_prompt_length", "by_output_length")}
    for part in parts:
        of_kind = groups[part.key]
        for name, finished in part.split(done):
            of_kind[name] = {"requests": len(finished), "finished": int(finished.sum()), "attainment": None}
        for key, column in (("prompt_tokens", requests.prompt), ("output_tokens", requests.output)):
            for name, tokens in part.split(column):
                of_kind[name][key] = int(tokens.sum(dtype=np.int64))
        if good is not None:
            for name, met in part.split(good):
                of_kind[name]["attainment"] = ratio(int(met.sum()), len(met))
    return groups
