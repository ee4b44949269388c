"""benchmarks/policies.py, recompute.py and prefix_hits.py: they run to their ends, and count what they say."""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from tokenyard.bench.step_times import StepTimes

Import = Callable[[str], ModuleType]


def main_of(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> tuple[int, list[str], dict[str, list[dict[str, object]]]]:
    """(exit code, lines of the tables, the report) of a script in this process."""
    monkeypatch.setattr(sys, "argv", [module.__name__, *arguments])
    code = module.main()
    *lines, report = capsys.readouterr().out.splitlines()
    return code, lines, json.loads(report)


# ---- policies.py ----------------------------------------------------------------------------------------------------


def test_a_policy_is_measured_beside_fcfs_in_both_cases_at_each_size(
    script: Import, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    module = script("policies")
    sizes = ("--sizes", "2", "5", "--waiting", "20", "--steps", "32", "--json", str(tmp_path / "report.json"))
    _, lines, report = main_of(module, monkeypatch, capsys, "--policies", "priority", *sizes)
    rows = report["rows"]
    assert [(row["case"], row["num_running"]) for row in rows] == [
        ("decode", 2),
        ("decode", 5),
        ("churn", 2),
        ("churn", 5),
    ]
    assert all(row["base_us"] and row["policy_us"] and row["why_not"] is None for row in rows)
    assert report["flatness"] == []  # its order is a static one
    assert len([line for line in lines if line.startswith("| priority | static |")]) == 4
    assert json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["rows"] == rows


@pytest.mark.parametrize(
    ("base_us", "added_us", "is_met"),
    [(50.0, 19.0, True), (50.0, 21.0, False), (500.0, 99.0, True), (500.0, 101.0, False)],
)
def test_a_static_order_may_add_20_us_or_a_fifth_whichever_is_more(
    script: Import, monkeypatch: pytest.MonkeyPatch, base_us: float, added_us: float, is_met: bool
) -> None:
    module = script("policies")
    monkeypatch.setattr(module, "turns", lambda first, second, num_steps: [(base_us, base_us + added_us)] * 3)
    row = module.measure("priority", "churn", 2, 3, 32, ())
    assert (row.base_us, row.added_us, row.is_within) == (base_us, added_us, is_met)


def test_a_policy_that_leaves_no_batch_to_measure_is_told_with_the_reason(script: Import) -> None:
    row = script("policies").measure("priority", "decode", 2, 3, 32, ("kv_cache.num_blocks=40",))
    assert row.policy_us is None
    assert row.why_not == "only 1 of 2 requests decode together"


def test_turns_alternate_and_hand_the_collector_back(script: Import) -> None:
    module, order = script("policies"), []

    class Counting:
        def __init__(self, name: str) -> None:
            self.name = name

        def run(self, num_steps: int) -> object:
            order.append(self.name)
            return StepTimes([1e-6] * num_steps, [2e-6] * num_steps, 1.0)

    pairs = module.turns(Counting("a"), Counting("b"), 48)
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert pairs == [(pytest.approx(3.0), pytest.approx(3.0))] * 3
    assert gc.get_freeze_count() == 0


def test_flat_is_the_cost_of_a_line_ten_times_as_long(script: Import) -> None:
    module = script("policies")
    row = module.flatness("priority", 10, 100, 32, ())
    assert row.near_us > 0
    assert row.ratio == row.far_us / row.near_us
    assert module.is_flat(module.Flatness(policy="p", near_us=1000.0, far_us=1250.0))
    assert module.is_flat(module.Flatness(policy="p", near_us=10.0, far_us=30.0))
    assert not module.is_flat(module.Flatness(policy="p", near_us=1000.0, far_us=1251.0))


@pytest.mark.parametrize(
    ("name", "wrong", "said"),
    [
        ("policies", ("--policies", "priority", "nope"), "no such policy: nope; there are: "),
        ("policies", ("--steps", "0"), "take numbers above 0"),
        ("policies", ("--peer-script", "x"), "a peer needs all of"),
        ("recompute", ("--policy", "nope"), "no such policy: nope; there are: "),
        ("prefix_hits", ("--policy", "nope"), "no such policy: nope; there are: "),
        ("recompute", ("--blocks", "100"), "--blocks takes 128 or more"),
        ("recompute", ("--rate", "0"), "numbers above 0"),
        ("prefix_hits", ("--groups", "0"), "take numbers above 0"),
    ],
)
def test_a_mistake_is_told_before_anything_runs(
    script: Import,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    name: str,
    wrong: tuple[str, ...],
    said: str,
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main_of(script(name), monkeypatch, capsys, *wrong)
    assert stopped.value.code == 2
    assert said in capsys.readouterr().err


# ---- recompute.py ---------------------------------------------------------------------------------------------------


def test_with_room_for_all_nothing_is_computed_twice_and_without_it_is(script: Import) -> None:
    module = script("recompute")
    work = module.mixed_requests(3, 60, 0.5)
    small, large = (module.run(work, blocks, ["scheduler=fcfs", *module.LIMITS]) for blocks in (150, 5000))
    assert (large.recomputed, large.num_preemptions) == (0, 0)
    assert small.num_preemptions > 0
    assert small.recomputed > 0
    assert small.needed == large.needed == sum(module_needed(one) for one in work)


def module_needed(work: object) -> int:
    """What each request asks for, by itself."""
    request = work.request  # type: ignore[attr-defined]
    return len(request.prompt_token_ids) + int(request.params.max_tokens) - 1


def test_requests_depend_on_the_seed_and_nothing_else(script: Import) -> None:
    module = script("recompute")

    def told(seed: int) -> list[tuple[object, ...]]:
        work = module.mixed_requests(seed, 20, 0.5)
        return [(one.step, one.request.prompt_token_ids.tolist(), one.request.params.max_tokens) for one in work]

    assert told(1) == told(1) != told(2)
    steps = [step for step, *_ in told(1)]
    assert steps == sorted(steps)


def test_a_policy_that_saves_nothing_misses_the_bar_with_a_prefix_cache_and_without(
    script: Import, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--blocks", "150", "--seeds", "1", "--requests", "40")
    code, lines, report = main_of(script("recompute"), monkeypatch, capsys, "--policy", "fcfs", *small)
    assert code == 1
    assert [row["prefix_caching"] for row in report["rows"]] == [False, True]
    assert [("MISSED" in line) for line in lines[2:]] == [True, True]
    assert all(row["base_recomputed"] == row["policy_recomputed"] for row in report["rows"])


def test_a_row_that_saves_is_within_the_bar_and_says_how_much(script: Import) -> None:
    module = script("recompute")
    outcome = script("policy_runs").Outcome(
        num_steps=1, num_preemptions=4, computed=1000, needed=800, hits=0, queries=0
    )
    row = module.compared(200, False, [outcome] * 2, [replace(outcome, computed=900), outcome])
    assert (row.base_recomputed, row.policy_recomputed, row.num_better) == (200, 150, 1)
    assert row.saved == 0.25
    assert row.base_tax == 0.2
    assert module.is_within_bar(row)


# ---- prefix_hits.py -------------------------------------------------------------------------------------------------


def test_with_room_for_every_prefix_fcfs_has_every_hit_there_is(script: Import) -> None:
    module = script("prefix_hits")
    shape = module.Shape(groups=16, prompts=6, prefix=64, suffix=16)
    works = [module.shared_prefixes(0, shape)]
    one_at_once = ["scheduler.max_num_seqs=1"]  # those that start together do not find what the first has yet to write
    row = module.measure(2.0, shape, works, ("fcfs", "fcfs"), one_at_once)
    assert row.base_rate == row.policy_rate == pytest.approx(row.best_rate)
    none = module.measure(0.0, shape, works, ("fcfs", "fcfs"), one_at_once)
    assert none.base_rate < row.base_rate


def test_an_order_that_wins_no_hit_misses_the_bar_only_where_the_cache_is_too_small(
    script: Import, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ("--share", "0.25", "1.5", "--groups", "8", "--prompts", "4", "--prefix", "64", "--suffix", "8")
    code, lines, report = main_of(script("prefix_hits"), monkeypatch, capsys, "--policy", "fcfs", *small)
    assert code == 1
    assert [("MISSED" in line) for line in lines[2:]] == [True, False]
    assert [row["share"] for row in report["rows"]] == [0.25, 1.5]
