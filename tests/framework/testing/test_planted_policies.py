"""PolicyContract is worth what it finds: policies with one fault each, and the rule that must name it."""

from __future__ import annotations

from collections.abc import Callable

import planted_parts
import planted_policies as planted
import pytest
from tokenyard.interfaces import SchedulingPolicy
from tokenyard.testing import ContractViolation, PolicyContract
from tokenyard.testing.contracts.starvation import SCENARIOS

Make = Callable[[], SchedulingPolicy]


def suite_of(make: Make) -> PolicyContract:
    suite = PolicyContract()
    suite.overrides, suite.simplifies = ["scheduler=planted"], False
    suite.descriptors = lambda: [planted_parts.policy(make)]  # type: ignore[method-assign]
    return suite


def violation(suite: PolicyContract, test: str, *arguments: str) -> ContractViolation:
    with pytest.raises(ContractViolation) as caught:
        getattr(suite, test)(*arguments)
    return caught.value


@pytest.mark.parametrize(
    ("make", "test", "rule"),
    [
        (planted.RandomOrder, "test_schedules_are_deterministic", "policy.deterministic"),
        (planted.RandomOrder, "test_it_draws_no_random_numbers_but_the_views", "policy.no_own_randomness"),
        (planted.OwnGenerator, "test_it_draws_no_random_numbers_but_the_views", "policy.no_own_randomness"),
        (planted.NumpysNumbers, "test_it_draws_no_random_numbers_but_the_views", "policy.no_own_randomness"),
        (planted.SetOrder, "test_ties_do_not_depend_on_hashes", "policy.ties"),
        (planted.HashOrder, "test_ties_do_not_depend_on_hashes", "policy.ties"),
        (planted.ReadsTheTime, "test_it_reads_no_clock_but_the_views", "policy.no_wall_clock"),
        (planted.ReadsAnImportedClock, "test_it_reads_no_clock_but_the_views", "policy.no_wall_clock"),
        (planted.ReadsAClockByItsNumber, "test_it_reads_no_clock_but_the_views", "policy.no_wall_clock"),
        (planted.ReadsTheDate, "test_it_reads_no_clock_but_the_views", "policy.no_wall_clock"),
        (planted.ReadsTheLocalTime, "test_it_reads_no_clock_but_the_views", "policy.no_wall_clock"),
        (planted.AsksAnEventLoop, "test_it_reads_no_clock_but_the_views", "policy.no_wall_clock"),
        (planted.KnowsTheTruth, "test_true_output_lengths_come_from_an_oracle_alone", "policy.oracle_boundary"),
        (planted.SortsInPlace, "test_it_changes_nothing_that_it_is_given", "policy.changes_nothing"),
        (planted.CountsAsPreempted, "test_it_changes_nothing_that_it_is_given", "policy.changes_nothing"),
        (planted.WritesMetadata, "test_it_changes_nothing_that_it_is_given", "policy.changes_nothing"),
    ],
)
def test_what_a_policy_may_not_do_or_depend_on_is_found(make: Make, test: str, rule: str) -> None:
    found = violation(suite_of(make), test)
    assert found.rule == rule
    assert str(found).startswith(f"{rule}: ")


@pytest.mark.parametrize(
    ("make", "test", "rule"),
    [
        (planted.IncomparableKeys, "test_every_request_ends_exactly_once", "policy.raises"),
        (planted.ForgetsWhoNeverRan, "test_every_request_ends_exactly_once", "policy.raises"),
        (planted.ForgetsWhoNeverRan, "test_ending_is_idempotent", "policy.raises"),
        (planted.ForgetsPreemptions, "test_every_request_ends_exactly_once", "policy.raises"),
    ],
)
@pytest.mark.parametrize("preempt_mode", ["recompute", "swap"])
def test_a_policy_that_stumbles_is_found(make: Make, test: str, rule: str, preempt_mode: str) -> None:
    assert violation(suite_of(make), test, preempt_mode).rule == rule


@pytest.mark.parametrize(
    ("make", "scenario"),
    [
        (planted.LastComeFirst, "long and patient"),
        (planted.LastComeFirst, "of no session"),
        (planted.ShortestFirst, "long and urgent"),
        (planted.ShortestOutputFirst, "a long output"),
        (planted.MostUrgentFirst, "short and patient"),
        (planted.SnubsAClient, "of another client"),
        (planted.WarmSessionsFirst, "of another session"),
        (planted.NeverForgetsService, "of a client that had much"),
        (planted.HurriedFirst, "in no hurry"),
        (planted.CachedFirst, "of nothing that is cached"),
        (planted.DefersForEver, "long and urgent"),
        (planted.NeverItsTurn, "of another client"),
        (planted.AlwaysTheSameVictim, "where blocks are short"),
    ],
)
def test_a_policy_that_starves_somebody_is_found(make: Make, scenario: str) -> None:
    suite = suite_of(make)
    suite.patience = 150
    found = violation(suite, "test_waiting_is_bounded", scenario)
    assert found.rule == "policy.bounded_waiting"
    assert f"a request {scenario}, among others that are not, has not ended after 150 steps" in str(found)


def test_a_policy_that_lets_somebody_lie_in_the_batch_for_ever_is_found() -> None:
    suite = suite_of(planted.YoungestFirst)
    suite.patience = 150
    found = violation(suite, "test_turns_are_bounded")
    assert found.rule == "policy.bounded_waiting"
    assert "a request a long output" in str(found) or "it is running, with 4 tokens" in str(found)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_policy_that_says_that_it_starves_is_not_asked(scenario: str) -> None:
    class Honest(planted.LastComeFirst):
        may_starve = True

    with pytest.raises(pytest.skip.Exception):
        suite_of(Honest).test_waiting_is_bounded(scenario)


def test_the_shortest_trace_is_told_call_by_call() -> None:
    """Two requests of two kinds are needed, and nothing else."""
    suite = suite_of(planted.IncomparableKeys)
    suite.simplifies = True
    text = str(violation(suite, "test_every_request_ends_exactly_once", "recompute"))
    assert text.count("add(") == 2
    assert "cannot be compared" in text
    assert not any(call in text for call in ("finish(", "reset_prefix_cache(", "advance("))


def test_the_shortest_trace_of_two_runs_that_differ_is_told() -> None:
    suite = suite_of(planted.HashOrder)
    suite.simplifies = True
    text = str(violation(suite, "test_ties_do_not_depend_on_hashes"))
    assert "with:\n  add(" in text
    assert text.count("add(") <= 8  # of some twenty; how many are needed depends on the hashes of this process
