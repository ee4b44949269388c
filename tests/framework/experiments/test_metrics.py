"""Metrics of a run against the same formulas written out row by row, and against numbers worked by hand."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from run_records import NAN, TOTALS, UNKNOWN_TOTALS, Row, record, some_rows, table
from tokenyard.experiments import metrics_statistics
from tokenyard.experiments.metrics import run_metrics
from tokenyard.experiments.metrics_goodput import HighestRate, highest_rate
from tokenyard.experiments.metrics_groups import MOST_GROUPS
from tokenyard.experiments.metrics_statistics import weighted_summary
from tokenyard.experiments.records import RequestStatus, StepTable, TokenGaps
from tokenyard.experiments.slo import SLO

FINISHED = RequestStatus.FINISHED
SLOS = st.builds(
    SLO, ttft=st.sampled_from([None, 1.0]), tpot=st.sampled_from([None, 0.1]), e2e=st.none() | st.just(4.0)
)

DEFINED: dict[str, Callable[[Row], float | None]] = {
    "ttft": lambda row: row.first - row.arrival,
    "tpot": lambda row: (row.finish - row.first) / (row.output - 1) if row.output > 1 else None,
    "e2e": lambda row: row.finish - row.arrival,
    "normalised_latency": lambda row: (row.finish - row.arrival) / row.output,
    "queueing_delay": lambda row: row.scheduled - row.arrival,
    "slowdown": lambda row: (row.finish - row.arrival) / (row.prompt + row.output),
}


def by_hand(values: Sequence[float | None]) -> dict[str, object]:
    given = [value for value in values if value is not None]
    if not given:
        return dict.fromkeys(("mean", "p50", "p90", "p99", "max"))
    return {
        "mean": pytest.approx(math.fsum(given) / len(given)),
        "p50": pytest.approx(np.percentile(given, 50)),
        "p90": pytest.approx(np.percentile(given, 90)),
        "p99": pytest.approx(np.percentile(given, 99)),
        "max": max(given),
    }


def is_good(row: Row, slo: SLO) -> bool:
    if row.status != FINISHED:
        return False
    tpot = DEFINED["tpot"](row) or 0.0
    taken = {"ttft": row.first - row.arrival, "tpot": tpot, "e2e": row.finish - row.arrival}
    return all(taken[name] <= most for name, most in slo.limits.items())


def metrics_of(rows: Sequence[Row], slo: SLO = SLO(), **options: object) -> dict[str, object]:  # noqa: B008 - frozen
    found = run_metrics(record(rows), slo, alone=lambda prompt, output: (prompt + output).astype(float), **options)  # type: ignore[arg-type]
    return cast("dict[str, object]", json.loads(json.dumps(found, allow_nan=False)))


# What one request went through


@settings(max_examples=40)
@given(some_rows())
def test_latencies_are_those_of_finished_requests_by_their_definitions(rows: list[Row]) -> None:
    found = metrics_of(rows)
    finished = [row for row in rows if row.status == FINISHED]
    for name, defined in DEFINED.items():
        assert found[name] == by_hand([defined(row) for row in finished]), name


def test_latencies_worked_by_hand() -> None:
    rows = [
        Row(arrival=1.0, scheduled=1.5, first=2.0, finish=4.0, prompt=10, output=101),
        Row(arrival=1.0, scheduled=2.5, first=4.0, finish=4.0, prompt=10, output=1),
    ]
    found = run_metrics(record(rows), SLO())
    assert found["ttft"] == {"mean": 2.0, "p50": 2.0, "p90": 2.8, "p99": 2.98, "max": 3.0}
    assert found["tpot"] == {"mean": 0.02, "p50": 0.02, "p90": 0.02, "p99": 0.02, "max": 0.02}
    assert found["queueing_delay"] == {"mean": 1.0, "p50": 1.0, "p90": 1.4, "p99": 1.49, "max": 1.5}
    assert cast("dict[str, float]", found["normalised_latency"])["max"] == 3.0
    assert cast("dict[str, float]", found["slowdown"])["mean"] is None


@given(st.lists(st.tuples(st.floats(0, 10), st.integers(0, 30)), max_size=30))
def test_gaps_are_summarised_as_if_each_were_written_out(gaps: list[tuple[float, int]]) -> None:
    seconds, counts = np.array([gap[0] for gap in gaps]), np.array([gap[1] for gap in gaps], dtype=np.int64)
    pooled = np.repeat(seconds, counts)
    assert weighted_summary(seconds, counts) == {
        key: None if value is None else pytest.approx(value, rel=1e-12, abs=1e-12)
        for key, value in metrics_statistics.summary(pooled).items()
    }


def test_itl_is_the_pool_of_all_gaps() -> None:
    gaps = TokenGaps(seconds=np.array([3.0, 1.0]), counts=np.array([2, 2]), relative_error=0.01)
    found = run_metrics(record([], gaps=gaps), SLO())
    assert found["itl"] == {"mean": 2.0, "p50": 2.0, "p90": 3.0, "p99": 3.0, "max": 3.0}
    assert found["itl_relative_error"] == 0.01


# What the run did


@settings(max_examples=40)
@given(some_rows(), SLOS)
def test_goodput_counts_what_met_every_limit(rows: list[Row], slo: SLO) -> None:
    found = metrics_of(rows, slo)
    finished = [row for row in rows if row.status == FINISHED]
    if not slo.limits:
        assert found["goodput"] is found["attainment"] is found["token_goodput"] is None
        return
    good = [row for row in rows if is_good(row, slo)]
    assert found["attainment"] == (len(good) / len(rows) if rows else None)
    for name, limit in slo.limits.items():
        met = sum(is_good(row, SLO(**{name: limit})) for row in rows)
        by_slo = cast("dict[str, float]", found["attainment_by_slo"])
        assert by_slo[name] == (met / len(rows) if rows else None)
    if finished:
        duration = max(row.finish for row in finished) - min(row.arrival for row in rows)
        assert found["goodput"] == pytest.approx(len(good) / duration)
        assert found["token_goodput"] == pytest.approx(sum(row.output for row in good) / duration)


def test_goodput_worked_by_hand() -> None:
    """One token has no TPOT that could be too long, and a limit is met by what takes just as long."""
    one_token = Row(arrival=0.0, scheduled=0.5, first=1.0, finish=1.0, output=1)
    just_in_time = Row(arrival=0.0, scheduled=0.5, first=1.0, finish=2.0, output=5)
    too_slow = replace(just_in_time, finish=2.25)
    aborted = replace(just_in_time, status=RequestStatus.ABORTED)
    found = metrics_of([one_token, just_in_time, too_slow, aborted], SLO(ttft=1.0, tpot=0.25))
    assert found["attainment"] == 0.5
    assert found["attainment_by_slo"] == {"ttft": 0.75, "tpot": 0.5}
    assert found["goodput"] == pytest.approx(2 / 2.25)
    assert found["token_goodput"] == pytest.approx(6 / 2.25)


@settings(max_examples=40)
@given(some_rows())
def test_throughput_and_counts_are_sums_over_rows(rows: list[Row]) -> None:
    found = metrics_of(rows)
    of_status = {status.name.lower(): sum(row.status == status for row in rows) for status in RequestStatus}
    assert found["requests"] == {"total": len(rows), **of_status}
    ends = [row.finish for row in rows if not math.isnan(row.finish)]
    assert found["makespan"] == (max(ends) if ends else None)
    finished = [row for row in rows if row.status == FINISHED]
    if not finished:
        assert found["duration"] is found["request_throughput"] is found["output_throughput"] is None
        return
    duration = max(row.finish for row in finished) - min(row.arrival for row in rows)
    assert found["duration"] == duration
    assert found["request_throughput"] == pytest.approx(len(finished) / duration)
    num_output = sum(row.output for row in finished)
    assert found["output_throughput"] == pytest.approx(num_output / duration)
    num_tokens = num_output + sum(row.prompt for row in finished)
    assert found["total_token_throughput"] == pytest.approx(num_tokens / duration)


@settings(max_examples=40)
@given(some_rows())
def test_usage_is_sums_over_rows_and_totals(rows: list[Row]) -> None:
    found = metrics_of(rows)
    recomputed = sum(row.recomputed for row in rows)
    assert found["recomputed_tokens"] == recomputed
    assert found["recompute_tax"] == recomputed / 1000
    assert found["num_preemptions"] == 3
    assert found["preemptions_per_request"] == (3 / len(rows) if rows else None)
    assert found["max_preemptions"] == max((row.preemptions for row in rows), default=0)
    admitted = [row for row in rows if not math.isnan(row.scheduled)]
    hits = sum(row.cached for row in admitted)
    assert found["hit_rate"] == (pytest.approx(hits / sum(row.prompt for row in admitted)) if admitted else None)
    assert found["kv_usage"] == {"mean": 0.25, "max": 0.5}
    has_deadline = [row for row in rows if not math.isnan(row.deadline)]
    met = sum(row.status == FINISHED and row.finish <= row.deadline for row in has_deadline)
    assert cast("dict[str, int]", found["deadlines"])["missed"] == len(has_deadline) - met


def test_the_request_rate_is_of_the_times_between_arrivals() -> None:
    rows = [Row(arrival=float(at), scheduled=3.0, first=3.5, finish=4.0, output=1) for at in (1, 1, 3)]
    assert metrics_of(rows)["request_rate"] == 1.0


def test_steps_that_used_their_whole_budget_are_counted() -> None:
    steps = StepTable(
        start=np.arange(4.0),
        end=np.arange(1.0, 5.0),
        running=np.ones(4, dtype=np.int32),
        waiting=np.zeros(4, dtype=np.int32),
        prefill_tokens=np.array([8, 6, 0, 0], dtype=np.int32),
        decode_tokens=np.array([0, 2, 7, 8], dtype=np.int32),
        used_blocks=np.ones(4, dtype=np.int32),
    )
    found = run_metrics(record([], steps=steps), SLO(), max_num_batched_tokens=8)
    assert found["budget_usage"] == {"mean": 0.75, "full": 0.75}


def test_what_a_remote_server_does_not_tell_is_null() -> None:
    rows = [Row(arrival=float(at), first=at + 1.0, finish=at + 2.0, output=2, client="ab"[at % 2]) for at in range(30)]
    found = run_metrics(record(rows, totals=UNKNOWN_TOTALS), SLO(ttft=2.0))
    unknown = ("recompute_tax", "num_preemptions", "recomputed_tokens", "max_preemptions", "hit_rate", "utilisation")
    assert [found[name] for name in unknown] == [None] * len(unknown)
    assert cast("dict[str, object]", found["queueing_delay"])["mean"] is None
    assert cast("dict[str, object]", found["starvation"])["max_wait"] is None
    assert cast("dict[str, object]", found["saturation"])["class"] is None
    assert cast("dict[str, object]", found["fairness"])["max_service_difference"] is None
    assert cast("dict[str, object]", found["fairness"])["jain_service"] == 1.0
    assert found["attainment"] == 1.0
    json.dumps(found, allow_nan=False)


# Groups


@settings(max_examples=40)
@given(some_rows())
def test_groups_are_what_their_rows_alone_would_give(rows: list[Row]) -> None:
    slo = SLO(ttft=1.0)
    found = metrics_of(rows, slo)
    bands = [(0, 15), (16, 63), (64, 255)]
    kinds: dict[str, Callable[[Row], object]] = {
        "by_client": lambda row: row.client or "(none)",
        "by_priority": lambda row: str(row.priority),
        "by_prompt_length": lambda row: next(f"{low}-{high}" for low, high in bands if row.prompt <= high),
        "by_output_length": lambda row: next(f"{low}-{high}" for low, high in bands if row.output <= high),
    }
    for kind, key in kinds.items():
        groups = cast("dict[str, dict[str, object]]", found[kind])
        counted = [row for row in rows if kind != "by_output_length" or row.status == FINISHED]
        names = {key(row) for row in counted}
        if (kind == "by_client" and names == {"(none)"}) or (kind == "by_priority" and len(names) < 2):
            names = set()
        assert set(groups) == names
        for name, group in groups.items():
            members = [row for row in counted if key(row) == name]
            finished = [row for row in members if row.status == FINISHED]
            assert group["requests"] == len(members)
            assert group["finished"] == len(finished)
            assert group["prompt_tokens"] == sum(row.prompt for row in members)
            assert group["output_tokens"] == sum(row.output for row in members)
            assert group["attainment"] == sum(is_good(row, slo) for row in members) / len(members)
            for metric, defined in DEFINED.items():
                assert group[metric] == by_hand([defined(row) for row in finished])


def test_a_group_is_judged_by_its_own_requests() -> None:
    good = Row(arrival=0.0, scheduled=0.5, first=1.0, finish=1.0, output=1, client="a")
    rows = [good, replace(good, first=2.0, finish=2.0), *[replace(good, client="b")] * 2]
    groups = cast("dict[str, dict[str, object]]", metrics_of(rows, SLO(ttft=1.0))["by_client"])
    assert {name: group["attainment"] for name, group in groups.items()} == {"a": 0.5, "b": 1.0}


def test_of_very_many_clients_the_largest_have_groups() -> None:
    rows = [Row(arrival=0.0, scheduled=0.0, first=1.0, finish=1.0, output=1, client=f"c{n}") for n in range(100)]
    found = metrics_of([*rows, *rows[90:]])
    groups = cast("dict[str, object]", found["by_client"])
    assert len(groups) == MOST_GROUPS
    assert {f"c{n}" for n in range(90, 100)} <= set(groups)
    assert cast("dict[str, object]", found["fairness"])["num_clients"] == 100


# Goodput as the highest rate


def test_the_highest_rate_lies_where_attainment_falls_below_its_share() -> None:
    assert highest_rate([4.0, 2.0, 1.0], [0.85, 0.95, 1.0]) == HighestRate(pytest.approx(3.0), is_at_least=False)
    assert highest_rate([1.0, 1.0, 3.0, 3.0], [1.0, 0.9, 0.9, 0.8]) == HighestRate(
        pytest.approx(2.0), is_at_least=False
    )
    assert highest_rate([1.0, 2.0], [1.0, 0.9]) == HighestRate(2.0, is_at_least=True)
    assert highest_rate([1.0, 2.0], [0.5, 0.4]) == HighestRate(None, is_at_least=False)
    assert highest_rate([1.0, 2.0], [0.5, 0.4], share=0.45) == HighestRate(pytest.approx(1.5), is_at_least=False)
    assert highest_rate([], []) == HighestRate(None, is_at_least=False)


# What holds of all


@settings(max_examples=40)
@given(some_rows(), SLOS, st.sampled_from([TOTALS, UNKNOWN_TOTALS]))
def test_json_never_holds_what_it_cannot_say(rows: list[Row], slo: SLO, totals: object) -> None:
    kept = record(rows, totals=totals)  # type: ignore[arg-type]
    json.dumps(run_metrics(kept, slo, alone=lambda prompt, output: np.full(len(prompt), NAN)), allow_nan=False)


def test_a_run_in_which_nothing_finished_has_no_latencies() -> None:
    rows = [Row(arrival=1.0, finish=1.0, status=RequestStatus.REJECTED)] * 3
    found = metrics_of(rows, SLO(ttft=1.0))
    assert cast("dict[str, object]", found["ttft"])["p99"] is None
    assert found["goodput"] is None
    assert found["attainment"] == 0.0


def test_long_columns_give_what_short_pieces_give(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    rows = []
    for arrival in np.cumsum(rng.exponential(1.0, 200)).tolist():
        scheduled = arrival + float(rng.exponential(3.0))
        first, output = scheduled + float(rng.exponential(1.0)), int(rng.integers(1, 50))
        client = f"c{rng.integers(3)}"
        rows.append(
            Row(
                arrival=arrival,
                scheduled=scheduled,
                first=first,
                finish=first + 0.1 * (output - 1),
                output=output,
                prompt=int(rng.integers(1, 500)),
                client=client,
                priority=int(rng.integers(2)),
            )
        )
    whole = metrics_of(rows, SLO(ttft=2.0))
    monkeypatch.setattr(metrics_statistics, "_PIECE", 7)
    assert _rounded(metrics_of(rows, SLO(ttft=2.0))) == _rounded(whole)


def test_the_reference_page_names_every_key() -> None:
    page = (Path(__file__).resolve().parents[3] / "docs/reference/metrics-of-experiments.md").read_text(
        encoding="utf-8"
    )
    found = metrics_of([Row(arrival=0.0, scheduled=0.5, first=1.0, finish=2.0, output=2)] * 20, SLO(ttft=1.0))
    nested = ("requests", "ttft", "deadlines", "fairness", "starvation", "saturation", "kv_usage", "budget_usage")
    keys = {*found, *(key for name in nested for key in cast("dict[str, object]", found[name]))}
    assert keys - set(re.findall(r"`([a-z_0-9]+)`", page)) == {"saturation", "class"}
    assert "`saturation.class`" in page


def test_the_table_is_left_as_it_was() -> None:
    rows = [Row(arrival=0.0, scheduled=NAN, finish=2.0, status=RequestStatus.ABORTED, client="a")] * 25
    kept = record([*rows, Row(arrival=1.0, scheduled=1.5, first=2.0, finish=5.0, output=4, client="b")])
    before = table([*rows, Row(arrival=1.0, scheduled=1.5, first=2.0, finish=5.0, output=4, client="b")])
    run_metrics(kept, SLO(ttft=1.0, tpot=1.0, e2e=1.0))
    for name in ("arrival", "first_scheduled", "first_token", "finish", "prompt", "output", "client"):
        np.testing.assert_array_equal(getattr(kept.requests, name), getattr(before, name))


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return float(f"{value:.9g}") if isinstance(value, float) else value
