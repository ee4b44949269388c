"""BatchScheduler: basics, stopping, chunks, preemption, priorities of the built-in mechanism."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_engine import EOS, ScriptedEngine
from tokenyard.errors import CapacityError, ConfigError, PluginError, ValidationError
from tokenyard.interfaces import RequestView, SchedulerView, SchedulingPolicy
from tokenyard.request import FinishReason
from tokenyard.scheduler.policy_calls import PolicyCalls


def test_ten_short_prompts_run_in_one_step_whole_and_in_order() -> None:
    engine = ScriptedEngine()
    for i in range(10):
        engine.add(f"r{i}", 5 + i, arrival=float(i))
    assert engine.scheduler.stats().num_waiting == 10
    engine.schedule()
    assert list(engine.scheduled().items()) == [(f"r{i}", 5 + i) for i in range(10)]
    assert engine.scheduler.stats().num_waiting == 0


def test_waiting_requests_can_be_ended_one_by_one() -> None:
    engine = ScriptedEngine()
    for i in range(10):
        engine.add(f"r{i}", 5)
    for i in range(10):
        assert engine.finish(f"r{i}", "unknown") == [f"r{i}"]
        assert engine.scheduler.stats().num_waiting == 9 - i
    assert engine.schedule() is None
    engine.check_idle()


@pytest.mark.parametrize(("chunked", "expected"), [(True, {"a": 800, "b": 224}), (False, {"a": 800})])
def test_nobody_overtakes_a_prompt_that_does_not_fit(chunked: bool, expected: dict[str, int]) -> None:
    engine = ScriptedEngine(
        max_num_batched_tokens=1024, max_num_seqs=3, max_model_len=1024, enable_chunked_prefill=chunked
    )
    for name, length in (("a", 800), ("b", 800), ("c", 10), ("d", 10)):
        engine.add(name, length)
    engine.schedule()
    assert engine.scheduled() == expected


def test_prefill_chunks_are_capped_and_sample_nothing_before_the_last() -> None:
    engine = ScriptedEngine(max_num_batched_tokens=1024, long_prefill_token_threshold=400)
    for name in "abc":
        engine.add(name, 800)
    for expected in ({"a": 400, "b": 400, "c": 224}, {"a": 400, "b": 400, "c": 224}, {"a": 1, "b": 1, "c": 352}):
        output = engine.schedule()
        assert output is not None
        assert engine.scheduled() == expected
        engine.update(output)
    assert {name: len(tokens) for name, tokens in engine.tokens.items()} == {"a": 2, "b": 2, "c": 1}


def test_running_decodes_are_never_starved_by_a_prefill() -> None:
    engine = ScriptedEngine(max_num_batched_tokens=64)
    engine.add("short", 8, max_tokens=30)
    engine.step()
    engine.add("long", 2000, max_tokens=1)
    for _ in range(29):
        engine.step()
    assert engine.ended["short"].reason is FinishReason.LENGTH


def test_eos_ends_a_request_and_is_kept_in_its_tokens() -> None:
    engine = ScriptedEngine()
    engine.add("a", 5)
    engine.add("b", 5)
    engine.step()
    engine.step({"a": [EOS]})
    assert engine.tokens["a"][-1] == EOS
    assert (engine.ended["a"].reason, engine.ended["a"].stop_reason) == (FinishReason.STOP, None)
    output = engine.schedule()
    assert output is not None
    assert len(output.finished) == 1
    assert engine.scheduled() == {"b": 1}


def test_eos_as_the_last_permitted_token_is_a_stop() -> None:
    engine = ScriptedEngine()
    engine.add("a", 5, max_tokens=1)
    engine.step({"a": [EOS]})
    assert engine.ended["a"].reason is FinishReason.STOP


def test_several_tokens_a_step_are_cut_at_the_stop_token_and_at_the_length() -> None:
    engine = ScriptedEngine()
    engine.add("stops", 5, max_tokens=10)
    engine.add("full", 5, max_tokens=2)
    engine.add("ignores", 5, max_tokens=10, ignore_eos=True)
    engine.step({"stops": [10, EOS, 12], "full": [10, 11, 12], "ignores": [EOS, 10, 11]})
    assert engine.tokens == {"stops": [10, EOS], "full": [10, 11], "ignores": [EOS, 10, 11]}
    assert engine.ended["stops"].reason is FinishReason.STOP
    assert engine.ended["full"].reason is FinishReason.LENGTH
    assert "ignores" not in engine.ended


def test_a_request_ended_between_schedule_and_update_gets_no_more_tokens_sch_14() -> None:
    engine = ScriptedEngine(prefix_caching=True)
    engine.add("a", 40)
    engine.add("b", 40)
    output = engine.schedule()
    assert output is not None
    held = engine.kv.usage
    engine.finish("a")
    assert engine.kv.usage == held, "the step in flight still writes to the blocks"
    engine.update(output)
    assert engine.kv.usage.num_free_blocks == held.num_free_blocks + 3
    assert engine.tokens["a"] == []
    assert len(engine.tokens["b"]) == 1
    engine.run()
    engine.check_idle()


def test_an_abort_between_two_prefill_chunks_leaks_nothing_sch_13() -> None:
    engine = ScriptedEngine(max_num_batched_tokens=32)
    engine.add("a", 200)
    engine.step()
    engine.finish("a")
    assert engine.schedule() is None
    engine.check_idle()


def test_a_prompt_larger_than_the_pool_is_refused_and_others_run_sch_01() -> None:
    engine = ScriptedEngine(num_blocks=8, max_model_len=512)
    with pytest.raises(CapacityError, match=r"200 tokens.*128"):
        engine.add("a", 200)
    engine.add("b", 10, max_tokens=4)
    engine.run(limit=100)
    assert len(engine.tokens["b"]) == 4
    engine.check_idle()


def test_a_lone_request_that_outgrows_the_pool_ends_by_length_sch_02() -> None:
    engine = ScriptedEngine(num_blocks=8, max_model_len=512, max_num_batched_tokens=32)
    engine.add("a", 100, max_tokens=100, ignore_eos=True)
    engine.run(limit=100)
    assert engine.ended["a"].reason is FinishReason.LENGTH
    assert len(engine.tokens["a"]) == 29  # 128 tokens with K/V, and one more that needs none
    assert engine.scheduler.stats().num_preemptions == 0
    engine.check_idle()


def test_a_preempted_request_resumes_with_all_its_tokens_sch_11() -> None:
    engine = ScriptedEngine(num_blocks=5, block_size=4, max_model_len=64)
    engine.add("a", 6, max_tokens=12, arrival=0.0)
    engine.add("b", 6, max_tokens=12, arrival=1.0)
    resumed = []
    while engine.scheduler.has_requests():
        output = engine.schedule()
        assert output is not None
        resumed += [(start, len(engine.tokens[start.request_id])) for start in output.resumed]
        engine.update(output)
    assert engine.scheduler.stats().num_preemptions == 1
    ((start, known),) = resumed
    assert start.request_id == "b"
    assert known >= 3
    assert start.num_prompt_tokens == 6
    assert start.token_ids[6:].tolist() == engine.tokens["b"][:known]
    assert {len(tokens) for tokens in engine.tokens.values()} == {12}
    engine.check_idle()


def test_blocks_are_taken_exactly_at_block_edges_kv_07() -> None:
    for length in (15, 16, 17, 31, 32, 33):
        engine = ScriptedEngine()
        engine.add("a", length, max_tokens=20, ignore_eos=True)
        engine.step()
        assert engine.kv.usage.num_total_blocks - engine.kv.usage.num_free_blocks == -(-length // 16)
        for written in range(length + 1, length + 20):
            engine.step()
            if "a" not in engine.ended:
                assert engine.kv.usage.num_total_blocks - engine.kv.usage.num_free_blocks == -(-written // 16)
        engine.check_idle()


def test_a_wholly_cached_prompt_still_computes_its_last_block_kv_01() -> None:
    for length, cached in ((16, 0), (32, 16), (48, 32)):
        engine = ScriptedEngine(prefix_caching=True)
        prompt = list(range(10, 10 + length))
        engine.add("a", prompt, max_tokens=4)
        engine.run()
        engine.add("b", prompt, max_tokens=4)
        outputs = engine.step()
        assert outputs is not None
        assert [admitted.num_cached_tokens for admitted in outputs.admitted] == [cached]
        engine.run()
        engine.check_idle()


def test_hits_count_once_however_long_a_request_waits_kv_09() -> None:
    engine = ScriptedEngine(prefix_caching=True, max_num_seqs=1)
    prompt = list(range(10, 58))
    engine.add("seed", prompt, max_tokens=1)
    engine.run()
    engine.add("first", 20, max_tokens=6)
    engine.add("waits", prompt, max_tokens=1, arrival=1.0)
    engine.run()
    stats = engine.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (48 + 20 + 48, 32)
    engine.check_idle()


def test_without_prefix_caching_nothing_counts_as_a_query() -> None:
    engine = ScriptedEngine(prefix_caching=False)
    engine.add("a", 20, max_tokens=1)
    engine.run()
    assert engine.scheduler.stats().prefix_cache_queries == 0


@pytest.mark.parametrize(
    ("prompt", "parameter"), [([], "prompt"), (list(range(64)), "prompt"), ([1, 5000], "prompt"), ([-1], "prompt")]
)
def test_a_request_that_can_never_run_leaves_no_trace(prompt: list[int], parameter: str) -> None:
    engine = ScriptedEngine(max_model_len=64)
    with pytest.raises(ValidationError) as caught:
        engine.add("a", prompt)
    assert caught.value.parameter == parameter
    assert not engine.scheduler.has_requests()
    engine.add("a", 5, max_tokens=1)
    engine.run()
    engine.check_idle()


def test_two_live_requests_cannot_share_an_id_and_an_old_id_can_be_used_again() -> None:
    engine = ScriptedEngine()
    engine.add("a", 5, max_tokens=1)
    with pytest.raises(ValidationError, match="in use"):
        engine.add("a", 5)
    engine.run()
    engine.ended.clear()
    engine.add("a", 5, max_tokens=1)
    engine.run()
    engine.check_idle()


def test_a_budget_below_the_context_needs_chunked_prefill() -> None:
    with pytest.raises(ConfigError, match="enable_chunked_prefill"):
        ScriptedEngine(max_num_batched_tokens=64, max_model_len=128, enable_chunked_prefill=False)


def run_recorded(engine: ScriptedEngine) -> list[dict[str, list[str]]]:
    """Run to the end; per step who entered new, resumed, and ran."""
    steps = []
    while engine.scheduler.has_requests():
        output = engine.schedule()
        assert output is not None
        entered = {
            "new": [start.request_id for start in output.new],
            "resumed": [start.request_id for start in output.resumed],
        }
        steps.append({**entered, "ran": list(engine.scheduled(output))})
        engine.update(output)
    return steps


def three_in_a_small_pool(policy: SchedulingPolicy | None = None) -> ScriptedEngine:
    engine = ScriptedEngine(num_blocks=6, block_size=4, max_model_len=64, policy=policy)
    for arrival, name in enumerate("abc"):
        engine.add(name, 7, max_tokens=9, arrival=float(arrival), priority=5 - arrival)
    return engine


def test_the_last_admitted_is_preempted_first_and_not_taken_back_in_the_same_step() -> None:
    engine = three_in_a_small_pool()
    steps = run_recorded(engine)
    lost = next(index for index, step in enumerate(steps) if index and "c" not in step["ran"])
    assert steps[lost - 1]["ran"] == ["a", "b", "c"]
    assert steps[lost]["ran"] == ["a", "b"]
    assert steps[lost]["resumed"] == []
    assert {name: len(tokens) for name, tokens in engine.tokens.items()} == {"a": 9, "b": 9, "c": 9}
    engine.check_idle()


def test_a_preempted_request_goes_before_everything_that_waits_whatever_its_key() -> None:
    class Reversed(SchedulingPolicy):
        def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
            return -request.arrival_time

    engine = ScriptedEngine(num_blocks=4, block_size=4, max_model_len=64, policy=Reversed())
    engine.add("late", 7, max_tokens=8, arrival=1.0)
    engine.add("early", 7, max_tokens=8, arrival=0.0)
    engine.step()
    engine.add("latest", 7, max_tokens=1, arrival=2.0)
    steps = run_recorded(engine)
    order = [name for step in steps for name in step["new"] + step["resumed"]]
    assert order == ["early", "latest"]
    engine.check_idle()


def test_every_chunk_of_a_long_prefill_is_capped() -> None:
    engine = ScriptedEngine(long_prefill_token_threshold=100)
    engine.add("a", 350, max_tokens=1)
    counts = []
    while engine.scheduler.has_requests():
        engine.step()
        counts.append(engine.scheduled()["a"])
    assert counts == [100, 100, 100, 50]


def test_kv_09_a_resumed_request_is_not_counted_again() -> None:
    engine = ScriptedEngine(num_blocks=5, block_size=4, max_model_len=64, prefix_caching=True)
    engine.add("a", 6, max_tokens=12, arrival=0.0)
    engine.add("b", 6, max_tokens=12, arrival=1.0)
    engine.run()
    stats = engine.scheduler.stats()
    assert stats.num_preemptions > 0
    assert (stats.prefix_cache_queries, stats.num_prompt_tokens) == (12, 12)


def test_requests_of_one_key_go_by_arrival_before_id() -> None:
    engine = ScriptedEngine(max_num_seqs=1)
    for name, arrival in (("a", 2.0), ("b", 1.0), ("c", 1.0)):
        engine.add(name, 5, arrival=arrival, max_tokens=1)
    engine.run()
    assert list(engine.ended) == ["b", "c", "a"]


def test_a_waiting_request_that_ends_leaves_nothing_in_the_cache_managers_memory() -> None:
    engine = ScriptedEngine(prefix_caching=True, max_num_seqs=1)
    prompt = list(range(10, 58))
    engine.add("seed", prompt, max_tokens=1)
    engine.run()
    engine.add("runs", 20, max_tokens=4)
    engine.step()
    engine.add("waits", prompt, max_tokens=1, arrival=1.0)
    engine.schedule()
    engine.finish("waits", "runs")
    engine.ended.clear()
    engine.add("waits", [*range(500, 548)], max_tokens=1)
    outputs = engine.step()
    assert outputs is not None
    assert [admitted.num_cached_tokens for admitted in outputs.admitted] == [0]


@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(1, 17), min_size=8, max_size=8))
def test_sch_12_no_step_exceeds_its_budget_with_hits_of_awkward_length(lengths: list[int]) -> None:
    engine = ScriptedEngine(max_num_batched_tokens=64, prefix_caching=True)
    prefix = list(range(10, 106))
    engine.add("seed", prefix, max_tokens=1)
    engine.run()
    for number, extra in enumerate(lengths):
        engine.add(f"r{number}", prefix + [200 + number] * extra, max_tokens=5, arrival=float(number))
    engine.run()  # ScriptedEngine checks the budget of every step
    engine.check_idle()


def test_a_policy_sees_what_each_step_did() -> None:
    class Watching(SchedulingPolicy):
        def __init__(self) -> None:
            self.outcomes: list[tuple[str, int, int, bool, bool]] = []
            self.preempted: list[tuple[str, int]] = []
            self.seen: list[tuple[int, int, int]] = []

        def on_step(self, outcomes, view):  # type: ignore[no-untyped-def]
            self.outcomes += [(o.request.request_id, *o[1:]) for o in outcomes]
            self.seen.append((view.num_running, len(view.running), sum(view.num_blocks(r) for r in view.running)))

        def on_preempt(self, preemptions, view):  # type: ignore[no-untyped-def]
            self.preempted += [(p.request.request_id, p.num_lost_tokens) for p in preemptions]

    policy = Watching()
    engine = ScriptedEngine(num_blocks=5, block_size=4, max_model_len=64, max_num_batched_tokens=8, policy=policy)
    engine.add("a", 10, max_tokens=2)
    engine.run()
    assert policy.outcomes == [("a", 8, 0, False, False), ("a", 2, 1, True, False), ("a", 1, 1, False, True)]
    assert policy.seen[0] == (1, 1, 3)
    engine.add("b", 6, max_tokens=12, arrival=0.0)
    engine.add("c", 6, max_tokens=12, arrival=1.0)
    engine.run()
    (preempted,) = policy.preempted
    assert preempted[0] == "c"
    assert preempted[1] >= 6
    engine.check_idle()


def test_a_priority_that_changes_nothing_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    engine = ScriptedEngine()
    engine.add("a", 5, priority=3, max_tokens=1)
    engine.add("b", 5, priority=4, max_tokens=1)
    assert caplog.text.count("changes nothing") == 1
    keyed = ScriptedEngine(policy=Urgent())
    keyed.add("a", 5, priority=3, max_tokens=1)
    assert caplog.text.count("changes nothing") == 1


def test_a_method_named_almost_like_a_decision_point_is_refused() -> None:
    class Misspelt(SchedulingPolicy):
        def waitingkey(self, request: RequestView, view: SchedulerView) -> object:
            return 0

    with pytest.raises(PluginError, match="'waitingkey' that nobody calls; did you mean 'waiting_key'"):
        ScriptedEngine(policy=Misspelt())


class Urgent(SchedulingPolicy):
    """Orders by priority and records its events."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return request.priority

    def on_arrival(self, requests, view):  # type: ignore[no-untyped-def]
        self.events += [f"arrival {request.request_id}" for request in requests]

    def on_finish(self, requests, reasons, view):  # type: ignore[no-untyped-def]
        self.events += [f"{reason} {request.request_id}" for request, reason in zip(requests, reasons, strict=True)]


def test_a_policys_key_orders_the_queue_with_ties_by_arrival_and_id() -> None:
    policy = Urgent()
    engine = ScriptedEngine(policy=policy, max_num_seqs=1)
    for name, priority, arrival in (("d", 5, 0.0), ("b", 1, 3.0), ("a", 1, 2.0), ("c", 1, 3.0)):
        engine.add(name, 5, priority=priority, arrival=arrival, max_tokens=1)
    engine.run()
    assert list(engine.ended) == ["a", "b", "c", "d"]
    assert policy.events == [
        "arrival d",
        "arrival b",
        "arrival a",
        "arrival c",
        "length a",
        "length b",
        "length c",
        "length d",
    ]


def test_a_policy_that_decides_what_is_not_asked_is_refused_by_name() -> None:
    class Chunks(SchedulingPolicy):
        def chunk_size(self, request: RequestView, num_left: int, view: SchedulerView) -> int:
            return 1

    with pytest.raises(PluginError, match=r"Chunks overrides chunk_size.*scheduler 'half' .*it asks: admit, victim"):
        PolicyCalls(Chunks(), frozenset({"admit", "victim"}), "half")


def test_keys_that_cannot_be_compared_refuse_the_request_and_keep_the_queue() -> None:
    class Mixed(SchedulingPolicy):
        def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
            return request.request_id if request.request_id == "bad" else 1

    engine = ScriptedEngine(policy=Mixed())
    engine.add("a", 5, max_tokens=1)
    with pytest.raises(PluginError, match="comparable"):
        engine.add("bad", 5)
    engine.run()
    engine.check_idle()


@pytest.mark.parametrize("point", ["waiting_key", "on_arrival"])
def test_a_policy_that_raises_refuses_the_request_by_its_own_name(point: str) -> None:
    def fail(self: SchedulingPolicy, requests: object, view: SchedulerView) -> None:
        raise ZeroDivisionError("policy bug")

    engine = ScriptedEngine(policy=type("Buggy", (SchedulingPolicy,), {point: fail})())
    with pytest.raises(PluginError, match=f"policy Buggy failed in {point}: ZeroDivisionError: policy bug"):
        engine.add("a", 5)
    assert not engine.scheduler.has_requests()
    assert engine.schedule() is None


def test_a_victim_is_one_of_the_candidates_or_an_error() -> None:
    class Wrong(SchedulingPolicy):
        def victim(self, candidates, num_blocks_needed, view):  # type: ignore[no-untyped-def]
            return "nobody"

    engine = ScriptedEngine(policy=Wrong(), num_blocks=5, block_size=4, max_model_len=64)
    engine.add("a", 6, max_tokens=12)
    engine.add("b", 6, max_tokens=12)
    with pytest.raises(PluginError, match="none of the 2 candidates"):
        engine.run()


def test_slots_grow_when_ended_requests_are_still_in_flight() -> None:
    engine = ScriptedEngine(max_num_seqs=2)
    engine.add("a", 5)
    engine.add("b", 5)
    in_flight = engine.schedule()
    assert in_flight is not None
    engine.finish("a", "b")
    engine.add("c", 5, max_tokens=1)
    engine.add("d", 5, max_tokens=1)
    second = engine.schedule()
    assert second is not None
    assert set(in_flight.slots.tolist()).isdisjoint(second.slots.tolist())
    engine.update(in_flight)
    engine.update(second)
    assert engine.tokens["a"] == engine.tokens["b"] == []
    engine.check_idle()


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32), caching=st.booleans(), blocks=st.integers(4, 40), budget=st.sampled_from([4, 16, 300])
)
def test_any_interleaving_keeps_every_invariant_and_loses_nothing(
    seed: int, caching: bool, blocks: int, budget: int
) -> None:
    rng = random.Random(seed)
    engine = ScriptedEngine(
        num_blocks=blocks,
        block_size=4,
        max_model_len=200,
        prefix_caching=caching,
        max_num_seqs=4,
        max_num_batched_tokens=budget,
    )
    prefix = [rng.randrange(10, 900) for _ in range(20)]
    wanted: dict[str, int] = {}
    for i in range(12):
        for _ in range(rng.randrange(3)):
            engine.step()
        prompt = prefix[: rng.randrange(20)] + [rng.randrange(10, 900) for _ in range(rng.randrange(1, 20))]
        if len(prompt) > 4 * blocks:
            continue
        name, limit = f"r{i}", rng.randrange(1, 12)
        engine.add(name, prompt, max_tokens=limit, ignore_eos=True, arrival=float(i))
        wanted[name] = min(limit, 4 * blocks + 1 - len(prompt))
        if rng.random() < 0.2:
            engine.finish(rng.choice(list(wanted)))
    engine.run()
    for name, limit in wanted.items():
        if engine.ended[name].reason is FinishReason.LENGTH:
            assert len(engine.tokens[name]) == limit
        else:
            assert engine.ended[name].reason is FinishReason.ABORT
    engine.check_idle()
    assert engine.scheduler.reset_prefix_cache()
