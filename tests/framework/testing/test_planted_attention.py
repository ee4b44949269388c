"""The suite for attention backends: a plain one that is right passes it, and each of many faults is found by name."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path

import planted_attention as planted
import planted_attention_steps as steps
import pytest
from tokenyard.config import NoOptions
from tokenyard.descriptors import Descriptor
from tokenyard.testing import AttentionBackendContract, ContractViolation

CLAIMS = "test_what_is_claimed_is_accepted_and_nothing_else"
REASONS = "test_what_it_refuses_has_reasons"
SIZES = "test_every_claimed_size_is_right"
ANY_STEP = "test_any_step_equals_float64"
MATES = "test_a_sequence_does_not_depend_on_its_batch_mates"
PIECES = "test_a_prompt_in_pieces_equals_the_whole"
WINDOW = "test_a_window_hides_what_is_before_it"
CAP = "test_a_soft_cap_bends_the_scores"
SINKS = "test_sinks_join_the_denominators"
LSE = "test_denominators_are_told"
PLAN = "test_one_plan_serves_layers_that_differ"
TOGETHER = "test_plans_of_one_step_are_held_together"
PREFIX = "test_a_prefix_is_read_in_the_step_that_writes_it"
UNWRITTEN = "test_what_was_never_written_does_not_matter"
TAILS = "test_tails_of_tables_do_not_matter"
LEFT = "test_blocks_that_left_the_window_do_not_matter"
OTHERS = "test_other_slots_stay_as_they_are"
OFFSETS = "test_offsets_need_more_than_32_bits"
VIEWS = "test_rows_may_be_views_of_a_fused_projection"
OUTPUT = "test_it_writes_its_output_whole_and_nothing_beside_it"
INPUTS = "test_it_changes_nothing_that_it_is_given"
RECORDED = "test_a_recorded_step_is_replayed_with_new_contents"


class TestARightBackendOfAnotherAuthor(AttentionBackendContract):
    max_examples = 8

    def descriptors(self) -> Sequence[Descriptor[NoOptions]]:
        return [planted.backend(planted.Right)]


FAULTS: list[tuple[type[planted.Right], str, str]] = [
    (steps.SupportsNothing, CLAIMS, "attention.claims"),
    (steps.SupportsNothing, ANY_STEP, "attention.claims"),
    (steps.RefusesOneSize, CLAIMS, "attention.claims"),
    (steps.SupportsAll, REASONS, "attention.reasons"),
    (steps.DividesByTheBlock, REASONS, "attention.reasons"),
    (steps.SaysNothing, REASONS, "attention.reasons"),
    (steps.ChangesItsMind, REASONS, "attention.reasons"),
    (steps.AcceptsFp8, REASONS, "attention.reasons"),
    (steps.OneBlockMore, "test_its_caches_are_as_large_as_the_engine_counts", "attention.layout"),
    (planted.OwnScale, ANY_STEP, "attention.reference"),
    (planted.HeadsInTurn, ANY_STEP, "attention.reference"),
    (planted.MaskFromTheFront, ANY_STEP, "attention.reference"),
    (planted.LastBlockForgotten, ANY_STEP, "attention.reference"),
    (planted.TF32, ANY_STEP, "attention.reference"),
    (planted.TF32, SIZES, "attention.sizes"),
    (planted.OneValueSize, SIZES, "attention.sizes"),
    (planted.LastBlockForgotten, "test_few_and_many_sequences", "attention.batch_sizes"),
    (planted.NeverCausalAsAsked, "test_without_a_mask_every_token_sees_all", "attention.not_causal"),
    (planted.SplitsByTheBatch, MATES, "attention.batch_mates"),
    (steps.KeepsItsPlan, PIECES, "attention.chunks"),
    (steps.ClearsTheBlock, ANY_STEP, "attention.reference"),
    (planted.WideWindow, WINDOW, "attention.window"),
    (planted.NarrowWindow, WINDOW, "attention.window"),
    (planted.NoWindow, WINDOW, "attention.window"),
    (planted.NoCap, CAP, "attention.soft_cap"),
    (planted.HardCap, CAP, "attention.soft_cap"),
    (planted.NoSinks, SINKS, "attention.sinks"),
    (planted.OneSink, SINKS, "attention.sinks"),
    (planted.BinaryLogs, LSE, "attention.lse"),
    (planted.LogsWithoutSinks, LSE, "attention.lse"),
    (steps.FirstLayersWindow, PLAN, "attention.plan_shared"),
    (steps.ItsLastPlan, TOGETHER, "attention.plans_together"),
    (steps.LengthsOfTheLastPlan, TOGETHER, "attention.plans_together"),
    (steps.ReadsBeforeItWrites, PREFIX, "attention.writes_first"),
    (steps.ReadsWholeBlocks, UNWRITTEN, "attention.unwritten_slots"),
    (steps.WeakMask, UNWRITTEN, "attention.unwritten_slots"),
    (steps.ReadsTheWholeTable, TAILS, "attention.table_tails"),
    (steps.LeftOfTheWindow, LEFT, "attention.left_window"),
    (steps.WritesTheNextSlot, OTHERS, "attention.other_slots"),
    (steps.Offsets32, OFFSETS, "attention.wide_offsets"),
    (steps.RowsInOnePiece, VIEWS, "attention.strided_rows"),
    (steps.Adds, ANY_STEP, "attention.reference"),
    (steps.LeavesOutTheLastRow, OUTPUT, "attention.out_whole"),
    (steps.LeavesOutALogarithm, OUTPUT, "attention.out_whole"),
    (steps.WritesFourRows, OUTPUT, "attention.out_whole"),
    (steps.ScalesTheQuery, INPUTS, "attention.inputs_unchanged"),
    (steps.ClampsTheTable, INPUTS, "attention.inputs_unchanged"),
    (steps.PlanClampsTheTable, INPUTS, "attention.inputs_unchanged"),
    (steps.PlanClampsTheHostsTable, INPUTS, "attention.inputs_unchanged"),
    (steps.PlanShiftsTheSlots, INPUTS, "attention.inputs_unchanged"),
    (steps.RecordingClampsTheTable, RECORDED, "attention.inputs_unchanged"),
    (steps.UpdateClampsTheHostsTable, RECORDED, "attention.inputs_unchanged"),
    (steps.NoUpdate, RECORDED, "attention.capture"),
    (steps.UpdatesOnce, RECORDED, "attention.capture"),
    (steps.RecordedLength, RECORDED, "attention.capture"),
]


def suite_of(make: type[planted.Right], **claims: object) -> AttentionBackendContract:
    suite = type("TestPlanted", (AttentionBackendContract,), {"simplifies": False, **claims})()
    assert isinstance(suite, AttentionBackendContract)
    suite.descriptors = lambda: [planted.backend(make)]  # type: ignore[method-assign]
    return suite


def violation(make: type[planted.Right], test: str, tmp_path: Path) -> ContractViolation:
    """What one test of the suite says of a backend."""
    suite = suite_of(make, same_bits=True)
    rule = getattr(suite, test)
    with pytest.raises(ContractViolation) as caught:
        rule(*([tmp_path] if inspect.signature(rule).parameters else []))
    return caught.value


@pytest.mark.parametrize(("make", "test", "rule"), FAULTS)
def test_a_broken_backend_is_found(make: type[planted.Right], test: str, rule: str, tmp_path: Path) -> None:
    found = violation(make, test, tmp_path)
    assert found.rule == rule
    assert str(found).startswith(f"{rule}: ")


FOREIGN: list[tuple[type[planted.Right], str, str]] = [
    *(
        (planted.OwnScale, test, "attention.reference")
        for test in (
            *(MATES, PIECES, WINDOW, CAP, SINKS, LSE, PLAN, TOGETHER, PREFIX, UNWRITTEN, TAILS, LEFT, OTHERS),
            *(OFFSETS, VIEWS, OUTPUT, INPUTS, RECORDED),
        )
    ),
    *((planted.BinaryLogs, test, "attention.lse") for test in (OUTPUT, INPUTS)),
    *((fault, PIECES, "attention.reference") for fault in (planted.MaskFromTheFront, steps.ClearsTheBlock)),
    (planted.NoSinks, LSE, "attention.sinks"),
    (planted.NoWindow, PLAN, "attention.window"),
    (planted.NoWindow, LEFT, "attention.window"),
    (planted.HardCap, RECORDED, "attention.soft_cap"),
    (steps.RowsInOnePiece, INPUTS, "attention.strided_rows"),
]


@pytest.mark.parametrize(("make", "test", "rule"), FOREIGN)
def test_what_a_rule_is_not_about_is_told_by_its_own_rule(
    make: type[planted.Right], test: str, rule: str, tmp_path: Path
) -> None:
    assert violation(make, test, tmp_path).rule == rule


def test_every_rule_has_a_fault_that_it_finds() -> None:
    rules = [name for name in vars(AttentionBackendContract) if name.startswith("test_")]
    assert {test for _, test, _ in FAULTS} == set(rules)


def test_a_wrong_number_is_told_with_its_place_and_sizes(tmp_path: Path) -> None:
    said = str(violation(planted.OwnScale, ANY_STEP, tmp_path))
    for words in ("position", "of sequence", "instead of", "lengths (query, K/V)", "query [", "window None"):
        assert words in said


@pytest.mark.parametrize(
    ("name", "claim"),
    [
        ("dtypes", ("float32", "float16")),
        ("head_dims", (64, 128)),
        ("v_head_dims", ()),
        ("group_sizes", (1, 4)),
        ("block_sizes", (16,)),
        ("windows", False),
        ("soft_caps", False),
        ("sinks", False),
    ],
)
def test_what_the_claims_leave_out_must_be_refused(name: str, claim: object) -> None:
    suite = suite_of(planted.Right, **{name: claim})
    with pytest.raises(
        ContractViolation, match=rf"attention.claims: supports\(\) accepts .*, which {name} of the suite"
    ):
        suite.test_what_is_claimed_is_accepted_and_nothing_else()


def test_bits_may_depend_on_batch_mates_where_nothing_else_is_claimed() -> None:
    suite_of(planted.SplitsByTheBatch).test_a_sequence_does_not_depend_on_its_batch_mates()


@pytest.mark.parametrize("test", [WINDOW, LEFT])
def test_rules_about_what_is_not_claimed_are_skipped_by_name(test: str) -> None:
    with pytest.raises(pytest.skip.Exception, match=r"not claimed: TestPlanted\.windows says no"):
        getattr(suite_of(planted.Right, windows=False), test)()
