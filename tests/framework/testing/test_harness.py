"""EngineHarness: real parts, scripted tokens, everything checked."""

from __future__ import annotations

import numpy as np
import pytest
from tokenyard.clock import VirtualClock
from tokenyard.errors import CapacityError, ConfigError, EngineDeadError, UnsupportedError, ValidationError
from tokenyard.interfaces import SchedulerSnapshot
from tokenyard.plugins import load_catalogue
from tokenyard.request import FinishReason
from tokenyard.testing import ContractViolation, EngineHarness

EOS = 50256


def harness(*overrides: str, **options: object) -> EngineHarness:
    return EngineHarness(["scheduler=fcfs", *overrides], **options)  # type: ignore[arg-type]


# What is set up


def test_defaults_are_the_products_but_for_sizes_that_need_a_model() -> None:
    config = harness().config
    assert (config.kv_cache.num_blocks, config.model.max_model_len) == (10_000, 8192)
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_batched_tokens) == (64, 2048)


def test_overrides_choose_parts_and_sizes() -> None:
    made = harness("engine=overlap", "scheduler=priority", "kv_cache.num_blocks=10", "model.max_model_len=100")
    assert type(made.core).__name__ == "OverlapEngineCore"
    assert type(made.policy).__name__ == "PriorityPolicy"
    assert (made.kv.num_total, made.config.model.max_model_len) == (10, 100)


def test_without_chunked_prefill_the_greatest_length_is_the_budget_unless_it_is_given() -> None:
    plain = ["scheduler.enable_chunked_prefill=false", "scheduler.max_num_batched_tokens=1024"]
    assert harness(*plain).config.model.max_model_len == 1024
    with pytest.raises(ConfigError, match=r"below model\.max_model_len"):
        harness(*plain, "model.max_model_len=2000")


def test_the_greatest_length_can_be_what_the_pool_holds() -> None:
    made = harness("model.max_model_len=-1", "kv_cache.num_blocks=4")
    name = made.add(range(60), max_tokens=None)
    made.run()
    assert len(made.request(name).output_token_ids) == 4


def test_memory_in_bytes_is_refused_since_nobody_knows_what_a_block_costs() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.memory=1GiB.*kv_cache\.num_blocks"):
        harness("kv_cache.memory=1GiB")


def test_mistakes_in_overrides_are_the_products_errors() -> None:
    with pytest.raises(ConfigError, match=r"did you mean 'scheduler\.max_num_seqs'"):
        harness("scheduler.max_num_seq=4")


def test_a_config_is_taken_instead_of_overrides_but_not_both() -> None:
    first = harness("kv_cache.num_blocks=7")
    with pytest.raises(ValidationError, match="not both"):
        EngineHarness(["a=1"], config=first.config, catalogue=load_catalogue())
    assert EngineHarness(config=first.config, catalogue=load_catalogue()).kv.num_total == 7


def test_a_config_without_a_catalogue_is_taken_with_the_installed_plugins() -> None:
    first = harness("kv_cache.num_blocks=7", "scheduler=priority")
    second = EngineHarness(config=first.config)
    assert (second.kv.num_total, type(second.policy)) == (7, type(first.policy))
    with pytest.raises(ValidationError, match="not both"):
        EngineHarness(["kv_cache.num_blocks=7"], config=first.config)


@pytest.mark.parametrize("config", [{"kv_cache": {"num_blocks": 7}}, ["kv_cache.num_blocks=7"], 7])
def test_a_config_of_a_wrong_type_is_refused(config: object) -> None:
    with pytest.raises(ValidationError, match=f"got a {type(config).__name__}; give text as overrides"):
        EngineHarness(config=config)  # type: ignore[arg-type]


@pytest.mark.parametrize("overrides", ["scheduler=fcfs", [7]])
def test_overrides_that_are_no_list_of_strings_are_refused(overrides: object) -> None:
    with pytest.raises(ValidationError, match="overrides are a list of strings such as"):
        EngineHarness(overrides)  # type: ignore[arg-type]


@pytest.mark.parametrize(("vocab_size", "eos"), [(1 << 20, 50256), (50257, 50256), (100, 99), (2, 1)])
def test_the_default_eos_is_in_the_vocabulary(vocab_size: int, eos: int) -> None:
    made = harness(vocab_size=vocab_size)
    name = made.add([1])
    made.step({name: [made.eos_token_id]})
    assert (made.eos_token_id, made.request(name).finish_reason) == (eos, "stop")


def test_without_an_eos_nothing_is_one() -> None:
    made = harness(eos_token_id=[])
    name = made.add([1], max_tokens=2)
    made.step({name: [50256]})
    assert made.running == [name]
    with pytest.raises(ValidationError, match="no eos_token_id"):
        _ = made.eos_token_id


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"vocab_size": 100, "eos_token_id": 100}, r"eos_token_id is a token id from 0 to 99 .* got 100"),
        ({"eos_token_id": [1, -1]}, r"eos_token_id is .* got \[1, -1\]"),
        ({"eos_token_id": 1.5}, "eos_token_id is .* got 1.5"),
        ({"vocab_size": 0}, "vocab_size is a number of tokens, at least 1; got 0"),
        ({"vocab_size": 1e3}, "vocab_size is a number of tokens"),
        ({"group_windows": ()}, r"group_windows has an entry for each K/V group, at least one.* got \(\)"),
        ({"group_windows": (None, 0)}, r"tokens of its sliding window, at least 1.* got \(None, 0\)"),
        ({"group_windows": 4}, "group_windows .* got 4"),
        ({"step_seconds": -0.5}, "step_seconds is a number of seconds, at least 0; got -0.5"),
        ({"step_seconds": float("nan")}, "step_seconds .* got nan"),
        ({"step_seconds": float("inf")}, "step_seconds .* got inf"),
        ({"step_seconds": "1"}, "step_seconds .* got '1'"),
    ],
)
def test_an_argument_that_makes_no_sense_is_refused_by_name(options: dict[str, object], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        harness(**options)


@pytest.mark.parametrize("seconds", [float("nan"), float("inf"), -1.0, "1"])
def test_time_passes_by_a_number_of_seconds_forwards(seconds: float) -> None:
    made = harness()
    with pytest.raises(ValidationError, match="seconds is a number of seconds, at least 0"):
        made.advance(seconds)
    assert made.clock.now() == 0.0


def test_modes_and_reasons_that_there_are_not_are_refused_with_those_there_are() -> None:
    made = harness()
    name = made.add([1])
    with pytest.raises(ValidationError, match="mode is one of 'keep', 'wait', 'abort'; got 'bogus'"):
        made.pause("bogus")
    with pytest.raises(ValidationError, match=r"reason is one of 'stop', .*; got 'bogus'"):
        made.finish(name, "bogus")
    made.step()
    assert made.running == [name]


def test_the_clock_may_be_the_tests_own() -> None:
    clock = VirtualClock(start=5.0)
    made = harness(clock=clock)
    made.advance(2.5)
    assert made.clock is clock
    assert clock.now() == 7.5


def test_a_step_may_take_a_time_that_depends_on_what_it_computes() -> None:
    with EngineHarness(step_seconds=lambda output: 0.5 * int(output.num_scheduled_tokens.sum())) as made:
        made.add([1, 2, 3], max_tokens=2, ignore_eos=True)
        made.run()
        assert made.clock.now() == 2.0  # three tokens, then one
    with EngineHarness(step_seconds=lambda output: -1.0) as made:
        made.add([1])
        with pytest.raises(EngineDeadError, match=r"step_seconds .* got -1"):
            made.step()


def test_steps_can_take_time() -> None:
    made = harness(step_seconds=0.25)
    made.add([1, 2, 3], max_tokens=4)
    made.run()
    assert made.clock.now() == 1.0


# Requests


def test_ids_count_up_and_skip_those_that_were_given() -> None:
    made = harness()
    assert [made.add([1]), made.add([1], "2"), made.add([1])] == ["0", "2", "3"]


def test_a_request_goes_from_waiting_to_running_to_finished() -> None:
    made = harness()
    name = made.add([1, 2, 3], max_tokens=2)
    request = made.request(name)
    assert (request.status, request.wait_reason, made.waiting) == ("waiting", "new", [name])
    made.step()
    assert (request.status, request.num_computed, made.running) == ("running", 3, [name])
    made.step()
    assert (request.status, request.finish_reason, made.running) == ("finished", "length", [])
    assert len(request.output_token_ids) == 2
    made.check_idle()


def test_a_record_tells_of_preemptions_and_hits() -> None:
    made = harness("kv_cache.num_blocks=4", "kv_cache.block_size=4", "scheduler.max_num_seqs=2")
    first, second = made.add(range(8), max_tokens=8), made.add(range(100, 107), max_tokens=8)
    made.run()
    assert [made.request(name).num_preemptions for name in (first, second)] == [0, 1]
    third = made.add([*range(100, 107), 1], max_tokens=1)
    made.run()
    assert made.request(third).num_cached in (0, 4)
    made.check_idle()


@pytest.mark.parametrize(
    ("prompt", "error", "words"),
    [
        ([], ValidationError, "0 tokens"),
        ([1, "two"], ValidationError, "integers"),
        ([-1], ValidationError, "vocabulary"),
        ([2**20], ValidationError, "vocabulary"),
        ([2**40], ValidationError, "vocabulary"),
        (range(9000), ValidationError, "9000 tokens"),
    ],
)
def test_a_bad_prompt_is_refused_as_in_the_product(prompt: list[int], error: type[Exception], words: str) -> None:
    made = harness()
    with pytest.raises(error, match=words):
        made.add(prompt)
    assert not made.has_requests


def test_what_the_cache_can_never_hold_is_refused_as_in_the_product() -> None:
    with pytest.raises(CapacityError, match="holds 32"):
        harness("kv_cache.num_blocks=2").add(range(40))


def test_e1_an_id_that_is_no_string_is_a_type_error() -> None:
    with pytest.raises(TypeError):
        harness().add([1], 7)  # type: ignore[arg-type]


def test_stop_strings_are_refused_since_there_is_no_text() -> None:
    with pytest.raises(UnsupportedError, match="stop_token_ids"):
        harness().add([1], stop=["end"])


def test_refused_and_misspelt_sampling_fields_are_told_by_name() -> None:
    with pytest.raises(ValidationError, match="max_tokens"):
        harness().add([1], max_tokens=0)
    with pytest.raises(UnsupportedError, match="flat_logprobs"):
        harness().add([1], flat_logprobs=True)
    with pytest.raises(TypeError, match="did you mean 'max_tokens'"):
        harness().add([1], max_token=3)


def test_fields_of_a_request_reach_the_policy_and_the_manager() -> None:
    made = harness()
    name = made.add([1, 2], client="c", session="s", parent="p", deadline=9.0, metadata={"k": 1}, cache_salt="t")
    core = made.request(name).core
    assert (core.client_id, core.session_id, core.parent_id, core.deadline) == ("c", "s", "p", 9.0)
    assert (core.metadata, core.cache_salt) == ({"k": 1}, "t")


def test_an_unknown_id_is_told_with_those_there_are() -> None:
    made = harness()
    made.add([1], "known")
    with pytest.raises(ValidationError, match=r"no request 'unknown' was added; there are \[known\]"):
        made.request("unknown")
    with pytest.raises(ValidationError, match="unknown"):
        made.step({"unknown": [1]})


# Steps


def test_tokens_are_what_the_script_says() -> None:
    made = harness()
    first, second = made.add([1, 2], max_tokens=9), made.add([3, 4], max_tokens=9)
    made.step({first: [11]})
    made.step(lambda name: [21] if name == second else None)
    assert made.request(first).output_token_ids[0] == 11
    assert made.request(second).output_token_ids[1] == 21


def test_s9_eos_ends_one_request_and_the_other_goes_on() -> None:
    made = harness()
    first, second = made.add([1, 2]), made.add([3, 4])
    made.step({first: [EOS]})
    ended = made.request(first)
    assert (ended.finish_reason, ended.stop_reason, ended.output_token_ids) == (FinishReason.STOP, None, [EOS])
    assert made.running == [second]
    made.step()
    assert made.last_output is not None
    assert len(made.last_output.finished) == 1


def test_s11_several_tokens_in_a_row_are_cut_at_the_limit() -> None:
    made = harness()
    name = made.add([1, 2], max_tokens=2)
    made.step({name: [10, 11, 12]})
    assert (made.request(name).output_token_ids, made.request(name).finish_reason) == ([10, 11], "length")


def test_s12_eos_may_be_ignored() -> None:
    made = harness()
    name = made.add([1, 2], ignore_eos=True)
    made.step({name: [EOS, 10, 11]})
    assert (made.request(name).output_token_ids, made.request(name).status) == ([EOS, 10, 11], "running")


def test_s22_a_row_may_sample_nothing() -> None:
    made = harness()
    name = made.add([1, 2], max_tokens=2)
    made.step({name: []})
    assert (made.sampled, made.stats.num_generation_tokens) == ({name: []}, 0)
    made.run()
    made.check_idle()


def test_s22_one_row_may_sample_nothing_while_another_samples_two() -> None:
    made = harness()
    none, two = made.add([1, 2], max_tokens=4), made.add([3, 4], max_tokens=4)
    made.step({none: [], two: [8, 9]})
    made.run()
    assert [made.request(name).finish_reason for name in (none, two)] == ["length", "length"]
    made.check_idle()


def test_s22_a_last_token_is_computed_again_although_a_window_has_moved_on() -> None:
    made = harness("kv_cache.block_size=1", "kv_cache.num_blocks=12", group_windows=(3,))
    first = made.add(range(6), max_tokens=4)
    made.step({first: []})
    second = made.add(range(20, 30), max_tokens=2)  # takes the blocks that the window has given back
    made.step()
    made.run()
    assert [made.request(name).finish_reason for name in (first, second)] == ["length", "length"]
    made.check_idle()


def test_default_tokens_depend_on_id_and_position_alone() -> None:
    small = harness("scheduler.max_num_seqs=1", "scheduler.max_num_batched_tokens=3")
    large = harness("engine=overlap")
    for made in (small, large):
        for number in range(3):
            made.add(range(number + 2), max_tokens=5)
        made.run()
    assert [small.request(str(n)).output_token_ids for n in range(3)] == [
        large.request(str(n)).output_token_ids for n in range(3)
    ]


def test_default_tokens_never_end_a_request() -> None:
    made = harness(vocab_size=3, eos_token_id=[0, 2])
    name = made.add([1], max_tokens=30)
    made.run()
    assert set(made.request(name).output_token_ids) == {1}


def test_scheduled_tells_the_tokens_of_each_request_in_the_last_step() -> None:
    made = harness("scheduler.max_num_batched_tokens=64", "scheduler.max_num_seqs=4")
    made.add(range(50))
    made.add(range(50, 100))
    assert made.scheduled == {}
    made.step()
    assert made.scheduled == {"0": 50, "1": 14}


def test_under_overlap_the_script_is_for_the_step_that_lands() -> None:
    made = harness("engine=overlap")
    name = made.add([1, 2, 3], max_tokens=5)
    made.step({name: [70]})
    assert len(made.last_outputs) == 2  # the pipeline was filled
    assert made.request(name).output_token_ids == [70]
    made.step({name: [EOS]})
    assert made.request(name).output_token_ids == [70, EOS]
    assert made.has_requests  # a step is still in flight for it
    made.run()
    made.check_idle()


def test_a_request_can_be_made_to_fail_alone() -> None:
    made = harness()
    bad, good = made.add([1]), made.add([2], max_tokens=2)
    made.step(errors={bad: "no luck"})
    made.run()
    assert (made.request(bad).finish_reason, made.request(bad).error) == ("error", "no luck")
    assert made.request(good).finish_reason == "length"


def test_a_request_that_fails_at_its_first_token_owes_no_prompt_logprobs() -> None:
    engine = EngineHarness(["scheduler.max_num_batched_tokens=5", "scheduler.max_num_seqs=1"])
    name = engine.add(list(range(1, 10)), max_tokens=2, prompt_logprobs=0)
    engine.step()
    engine.step(errors={name: "its logits are not finite"})
    assert engine.request(name).finish_reason is FinishReason.ERROR
    engine.check_idle()


def test_finish_ends_alive_ids_and_ignores_others() -> None:
    made = harness()
    first, second = made.add([1]), made.add([2])
    made.step()
    assert made.finish([first, "unknown", first]) == [first]
    assert made.finish(first) == []
    assert made.finish(second, "stop") == [second]
    assert (made.request(first).finish_reason, made.request(second).finish_reason) == ("abort", "stop")
    made.check_idle()


def test_pause_and_resume_are_those_of_the_loop() -> None:
    made = harness()
    name = made.add([1], max_tokens=3)
    made.step()
    made.pause()
    assert not made.step().did_run
    made.resume()
    made.run()
    assert made.request(name).finish_reason == "length"
    kept = made.add([1])
    assert made.pause("abort") == [kept]
    assert made.request(kept).finish_reason == "abort"


def test_run_says_how_many_steps_it_took_and_gives_up_at_a_limit() -> None:
    made = harness()
    made.add([1], max_tokens=4)
    assert made.run() == made.steps == 4
    made.add([1], max_tokens=9)
    with pytest.raises(ContractViolation, match=r"progress\.bounded: not done after 3 steps"):
        made.run(limit=3)


def test_time_passes_in_run_when_nothing_can_run() -> None:
    made = harness()
    name = made.add([1], deadline=4.0)
    made.pause()
    made.run()
    assert (made.request(name).finish_reason, made.request(name).stop_reason) == ("abort", "deadline")


# Blocks and numbers


def test_the_cache_can_be_looked_at() -> None:
    made = harness("kv_cache.num_blocks=10", "kv_cache.block_size=4")
    name = made.add(range(9), max_tokens=4)
    made.step()
    assert made.blocks(name) == [1, 2, 3]
    assert (made.kv.num_free, made.kv.num_total, len(made.kv.cached_hashes)) == (7, 10, 2)
    assert [made.kv.ref_counts[block] for block in (1, 2, 3, 4)] == [1, 1, 1, 0]
    assert not made.reset_prefix_cache()
    made.finish(name)
    assert made.reset_prefix_cache()
    assert made.kv.cached_hashes == frozenset()


def test_groups_with_windows_have_tables_of_their_own() -> None:
    made = harness("kv_cache.num_blocks=20", "kv_cache.block_size=4", group_windows=(None, 4))
    name = made.add(range(17), max_tokens=3)
    made.step()
    assert len(made.blocks(name)) == len(made.blocks(name, group=1)) == 5
    assert made.blocks(name, group=1)[0] == 0
    made.run()
    made.check_idle()


def test_stats_are_the_schedulers() -> None:
    made = harness()
    made.add([1, 2, 3], max_tokens=2)
    made.run()
    assert (made.stats.num_prompt_tokens, made.stats.num_generation_tokens) == (3, 2)


# What is found


def test_a_violation_names_its_rule_and_what_led_there() -> None:
    made = harness()
    made.add([1, 2, 3], "a")
    made.step()
    made.kv_cache_manager.free(made.request("a"))  # behind the scheduler's back
    with pytest.raises(ContractViolation) as caught:
        made.step()
    assert caught.value.rule == "table.covers_computed"
    message = str(caught.value)
    assert message.startswith(caught.value.rule)
    assert "add([1, 2, 3], 'a', priority=0)" in message
    assert "step() scheduled {'a': 3}" in message


def test_check_invariants_can_be_called_at_any_time() -> None:
    made = harness(checks=False)
    made.add([1, 2, 3], "a")
    made.step()
    made.check_invariants()
    made.kv_cache_manager.free(made.request("a"))
    with pytest.raises(ContractViolation, match=r"table\.covers_computed"):
        made.check_invariants()


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_without_checks_nobody_looks_at_all_requests_until_a_test_asks(
    loop: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = harness(f"engine={loop}", "scheduler.max_num_seqs=2", checks=False)
    looks: list[int | None] = []
    snapshot = made.scheduler.snapshot

    def counted(limit: int | None = None) -> SchedulerSnapshot:
        looks.append(limit)
        return snapshot(limit)

    monkeypatch.setattr(made.scheduler, "snapshot", counted)
    names = [made.add([1, 2], max_tokens=3) for _ in range(9)]
    made.step()
    made.step()
    made.finish(names[-1])
    assert not looks
    states = [record.status.value for record in made.requests.values()]
    assert states == ["running"] * 2 + ["waiting"] * 6 + ["finished"]
    assert made.request(names[2]).wait_reason == "max_num_seqs"
    assert len(looks) == 1  # nothing has changed since
    made.run()
    made.check_idle()
    assert [made.request(name).finish_reason for name in names] == ["length"] * 8 + ["abort"]


def test_without_checks_a_record_tells_the_same_of_a_request_that_has_ended() -> None:
    told = []
    for checks in (True, False):
        made = harness("kv_cache.num_blocks=4", "kv_cache.block_size=4", "scheduler.max_num_seqs=2", checks=checks)
        names = [made.add(range(8), max_tokens=8), made.add(range(100, 107), max_tokens=8)]
        made.run()
        records = [made.request(name) for name in names]
        told.append([(row.output_token_ids, row.finish_reason, row.num_cached, row.num_preemptions) for row in records])
    assert told[0] == told[1]
    assert [row[-1] for row in told[0]] == [0, 1]


def test_check_idle_tells_what_is_left() -> None:
    made = harness()
    made.add([1, 2, 3], "a")
    with pytest.raises(ContractViolation, match=r"idle\.nothing_left.*\['a'\]"):
        made.check_idle()


def test_an_engine_that_died_can_be_closed_like_any_other() -> None:
    made = harness()
    made.add([1, 2, 3])
    made.executor.failure = RuntimeError("the worker is gone")
    with pytest.raises(EngineDeadError, match="the worker is gone"):
        made.step()
    made.close()
    assert made.executor.num_shutdowns == 1


def test_a_request_that_vanishes_is_found() -> None:
    made = harness()
    made.add([1, 2, 3], "a")
    made.add([1, 2, 3], "b")
    made.step()
    made.scheduler.finish_requests(["a"], FinishReason.ABORT)  # nobody told the harness
    with pytest.raises(ContractViolation, match=r"request\.lost: 'a'"):
        made.step()


@pytest.mark.parametrize("tokens", [[5], 5, np.array([5]), [np.int64(5)], np.int32(5)])
@pytest.mark.parametrize("is_function", [True, False])
def test_a_script_gives_tokens_in_any_form(tokens: object, is_function: bool) -> None:
    with EngineHarness() as engine:
        name = engine.add([1, 2], max_tokens=2)
        engine.step((lambda _: tokens) if is_function else {name: tokens})  # type: ignore[arg-type,dict-item,return-value]
        assert engine.request(name).output_token_ids == [5]


@pytest.mark.parametrize("tokens", [[-1], [1 << 20], [2**70], [5.0], [True], "5", 5.0])
@pytest.mark.parametrize("is_function", [True, False])
def test_a_script_that_gives_no_tokens_is_told_as_the_tests_own_mistake(tokens: object, is_function: bool) -> None:
    engine = EngineHarness()
    name = engine.add([1, 2], max_tokens=2)
    with pytest.raises(ValidationError, match=f"the script for '{name}' gave"):
        engine.step((lambda _: tokens) if is_function else {name: tokens})  # type: ignore[arg-type,dict-item,return-value]


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_a_function_is_asked_only_for_requests_that_have_not_ended(loop: str) -> None:
    with EngineHarness([f"engine={loop}"]) as engine:
        scripts = {"a": [10, engine.eos_token_id], "b": [11, 12, 13]}
        for name in scripts:
            engine.add([1, 2], name, max_tokens=9)
        for turn in range(9):
            engine.step(lambda name: [scripts[name].pop(0)])
            if turn == 2:
                engine.finish("b")
        assert engine.request("a").output_token_ids == [10, engine.eos_token_id]
        assert engine.request("b").output_token_ids == [11, 12, 13]


def test_what_a_script_raises_is_what_a_test_sees() -> None:
    engine = EngineHarness()
    engine.add([1, 2])

    def script(name: str) -> list[int]:
        raise LookupError(name)

    with pytest.raises(LookupError):
        engine.step(script)


def test_more_host_memory_than_a_harness_can_hold_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.host_memory=100TiB is \d+ blocks in a harness.* give at most"):
        EngineHarness(["kv_cache.host_memory=100TiB"])
