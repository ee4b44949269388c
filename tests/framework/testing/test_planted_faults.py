"""A suite is worth what it finds: parts with one fault each, and the rule that must name it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import planted_logprobs
import planted_parts as planted
import planted_swapping as swapping
import pytest
from tokenyard.config import NoOptions
from tokenyard.descriptors import Descriptor
from tokenyard.interfaces import Executor, ExecutorContext, KVCacheManager
from tokenyard.testing import (
    ContractViolation,
    EngineCoreContract,
    ExecutorContract,
    KVCacheManagerContract,
    ObserverContract,
    SchedulerContract,
)
from tokenyard.testing.contracts.base import Contract

LOGPROBS = "test_logprobs_are_those_of_the_sampled_tokens"
PROMPT_LOGPROBS = "test_prompt_logprobs_do_not_depend_on_chunks"


def found(suite: Contract, part: Descriptor[NoOptions], overrides: Sequence[str], rule: Callable[[], None]) -> str:
    """The id of the rule that one test of a suite says is violated."""
    suite.overrides, suite.simplifies = overrides, False
    suite.descriptors = lambda: [part]  # type: ignore[method-assign]
    with pytest.raises(ContractViolation) as caught:
        rule()
    assert str(caught.value).startswith(f"{caught.value.rule}: ")
    return caught.value.rule


@pytest.mark.parametrize(
    ("make", "test", "rule"),
    [
        (planted.Leaking, "sound", "kv.conservation"),
        (planted.HandsOutTwice, "sound", "kv.content"),
        (planted.HalfAllocates, "sound", "kv.whole_or_nothing"),
        (planted.HalfAllocates, "test_allocation_is_whole_or_nothing", "kv.whole_or_nothing"),
        (planted.ImpureLookup, "test_looking_up_changes_nothing", "kv.lookup_pure"),
        (planted.FreesInHashOrder, "test_it_depends_on_nothing_but_its_calls", "kv.deterministic"),
        (planted.Stingy, "sound", "kv.refuses_only_when_short"),
        (planted.ResetsInUse, "test_reset_forgets_everything_or_nothing", "kv.reset"),
        (planted.BreaksOnUnknown, "test_freeing_is_idempotent", "kv.free_idempotent"),
        (planted.HitsWholePrompt, "test_committed_blocks_are_found", "kv.hit_below_length"),
        (planted.HitsWholePrompt, "sound", "kv.hit_below_length"),
        (planted.IgnoresSalt, "test_tenants_and_adapters_do_not_share", "kv.separates"),
        (planted.IgnoresSalt, "sound", "kv.content"),
        (planted.CommitsTooEarly, "test_what_is_not_committed_is_not_found", "kv.only_committed"),
        (planted.CommitsTooEarly, "sound", "kv.content"),
        (planted.NeverForgets, "test_freed_blocks_stay_findable_until_they_are_reused", "kv.content_outlives_request"),
    ],
)
def test_a_broken_manager_is_found(make: type, test: str, rule: str) -> None:
    suite = KVCacheManagerContract()
    suite.max_examples = 150
    if test == "sound":
        run = lambda: suite.test_blocks_are_neither_lost_nor_shared_wrongly(2)  # noqa: E731
    else:
        run = getattr(suite, test)
    assert found(suite, planted.manager(make), ["kv_cache=planted"], run) == rule


@pytest.mark.parametrize(
    ("make", "test", "rule"),
    [
        (swapping.NeverSwaps, "test_what_is_swapped_out_comes_back", "kv.swap_refuses_only_when_short"),
        (swapping.NeverSwaps, "sound", "kv.swap_refuses_only_when_short"),
        (swapping.SwapsAndSaysNo, "sound", "kv.swap_whole_or_nothing"),
        (swapping.FreesWhatItSwaps, "sound", "kv.swap_copies"),
        (swapping.NeverForgets, "sound", "kv.forget_swapped"),
        (swapping.SwapsBlocks, "sound", "kv.content"),
        (swapping.SwapsBlocks, "test_what_is_swapped_out_comes_back", "kv.content"),
        (swapping.LosesACopy, "sound", "kv.content"),
        (swapping.CopiesNowhere, "sound", "kv.transfer_blocks"),
        (swapping.CountsSharedBlocks, "sound", "kv.exclusive_blocks"),
        (swapping.ForgetsThatIdleBlocksAreFree, "sound", "kv.saved_blocks"),
        (swapping.StandsStill, "sound", "kv.prefix_version"),
        (swapping.NamesBlocksAlone, "test_names_of_blocks_tell_their_content", "kv.prefix_hashes"),
        (swapping.ReadsAClock, "test_it_reads_no_clock", "kv.no_wall_clock"),
    ],
)
def test_a_manager_that_swaps_wrongly_or_tells_what_is_not_so_is_found(
    make: Callable[..., KVCacheManager], test: str, rule: str
) -> None:
    suite = KVCacheManagerContract()
    suite.max_examples, suite.swaps, suite.group_windows = 150, True, (None, None)
    run = getattr(suite, test, lambda: suite.test_blocks_are_neither_lost_nor_shared_wrongly(2))
    assert found(suite, swapping.manager(make), ["kv_cache=planted"], run) == rule


def test_the_shortest_calls_of_a_manager_are_told() -> None:
    suite = KVCacheManagerContract()
    suite.overrides, suite.max_examples, suite.swaps = ["kv_cache=planted"], 150, True
    suite.descriptors = lambda: [swapping.manager(swapping.SwapsBlocks)]  # type: ignore[method-assign]
    with pytest.raises(ContractViolation) as caught:
        suite.test_blocks_are_neither_lost_nor_shared_wrongly(2)
    calls = str(caught.value).partition("after:\n")[2].splitlines()
    assert {call.split("(")[0].strip() for call in calls} >= {"admit", "compute", "swap_out", "take_back"}
    assert len(calls) <= 8


@pytest.mark.parametrize(
    ("make", "test", "rule"),
    [
        (planted.OverBudget, "test_every_request_ends_exactly_once", "step.budget"),
        (planted.LeavesRoom, "test_every_request_ends_exactly_once", "progress.work_conserving"),
        (planted.LosesOnFinish, "test_ending_is_idempotent", "scheduler.finish_idempotent"),
        (planted.LosesOnFinish, "test_every_request_ends_exactly_once", "request.finish_returns_alive"),
        (planted.ForgetsEnds, "test_every_request_ends_exactly_once", "request.ends_when_due"),
        (planted.TellsTwice, "test_every_request_ends_exactly_once", "request.ends_once"),
        (planted.FallsAsleep, "test_every_request_ends_exactly_once", "progress.stalled"),
        (planted.DropsATenthToken, "test_every_request_ends_exactly_once", "request.tokens_as_sampled"),
        (planted_logprobs.PassesLogprobsOn, "test_logprobs_stay_with_their_tokens", "request.logprobs_as_sampled"),
        (planted_logprobs.PassesPromptLogprobsOn, "test_logprobs_stay_with_their_tokens", "request.only_live"),
        (
            planted_logprobs.NeverAsks,
            "test_logprobs_stay_with_their_tokens",
            "request.prompt_logprobs_complete",
        ),
    ],
)
def test_a_broken_scheduler_is_found(make: type, test: str, rule: str) -> None:
    suite = SchedulerContract()
    suite.max_examples = 60
    assert found(suite, planted.scheduler(make), ["scheduler=planted"], getattr(suite, test)) == rule


@pytest.mark.parametrize(
    ("make", "test", "rule"),
    [
        (
            planted.UpdatesTwice,
            "test_a_step_is_scheduled_executed_sampled_and_updated_once_in_order",
            "engine.order",
        ),
        (
            planted.SamplesBeforeExecuting,
            "test_a_step_is_scheduled_executed_sampled_and_updated_once_in_order",
            "engine.order",
        ),
        (planted.SamplesBeforeExecuting, "test_under_any_trace_the_engine_is_sound", "executor.one_sample"),
        (planted.IgnoresPauses, "test_a_pause_that_keeps_stops_everything_and_loses_nothing", "engine.pause_keep"),
        (planted.IgnoresPauses, "test_a_pause_that_aborts_ends_all_and_holds_back_new_ones", "engine.pause_abort"),
        (planted.ForgetsItIsDead, "test_a_step_that_raises_ends_the_engine", "engine.dies_cleanly"),
        (planted.KillsTheExecutorTwice, "test_shutting_down_is_idempotent", "engine.shutdown_once"),
    ],
)
def test_a_broken_loop_is_found(make: type, test: str, rule: str) -> None:
    suite = EngineCoreContract()
    assert found(suite, planted.engine(make), ["engine=planted"], getattr(suite, test)) == rule


@pytest.mark.parametrize(
    ("make", "test", "rule"),
    [
        (planted.SwapsRows, "test_rows_keep_their_order", "executor.row_order"),
        (planted.AnswersAnything, "test_an_unknown_function_is_refused", "executor.unknown_rpc"),
        (planted_logprobs.forgets_logprobs, LOGPROBS, "executor.logprobs"),
        (planted_logprobs.leaves_out_the_token_itself, LOGPROBS, "executor.logprobs"),
        (planted_logprobs.loses_the_last_of_a_chunk, PROMPT_LOGPROBS, "executor.prompt_logprobs"),
        (planted_logprobs.likely_tokens_in_any_order, PROMPT_LOGPROBS, "executor.prompt_logprobs"),
    ],
)
def test_a_broken_executor_is_found(
    make: Callable[[ExecutorContext], Executor], test: str, rule: str, tiny_llama_dir: Path
) -> None:
    suite = ExecutorContract()
    suite._rigs = []
    overrides = ["executor=planted", f"model.name={tiny_llama_dir}", "model.dtype=float32", "kv_cache.num_blocks=64"]
    try:
        assert found(suite, planted.executor(make), overrides, getattr(suite, test)) == rule
    finally:
        for rig in suite._rigs:
            rig.close()


@pytest.mark.parametrize(
    ("make", "test", "rule"),
    [
        (planted.Mutates, "test_it_changes_nothing", "observer.changes_nothing"),
        (planted.NeedsStats, "test_it_needs_no_stats", "observer.never_raises"),
    ],
)
def test_a_broken_observer_is_found(make: type, test: str, rule: str) -> None:
    suite = ObserverContract()
    assert found(suite, planted.observer(make), ["observers=[planted]"], getattr(suite, test)) == rule


class TestTinyManager(KVCacheManagerContract):
    """A right manager of another author, which is no plugin, passes."""

    overrides = ("kv_cache=planted",)
    shares_prefixes = False
    max_examples = 8

    def descriptors(self) -> Sequence[Descriptor[NoOptions]]:
        return [planted.manager(planted.TinyManager)]


class TestOldTinyManager(TestTinyManager):
    """So does one that was written for plugin API 1.1."""

    def descriptors(self) -> Sequence[Descriptor[NoOptions]]:
        return [planted.manager(planted.OldTinyManager)]
