"""mlfq, las, plas and hrrn: orders by what was served and how long one has waited, in figures worked out by hand."""

from __future__ import annotations

import pytest
from tokenyard.testing import EngineHarness
from tokenyard_plugins import plas
from turn_taking import Job, add, engine_of, play

PAUSE = "scheduler.preempt_mode=pause"

# MLFQ


def test_a_request_joins_the_level_whose_quantum_holds_its_prompt() -> None:
    """Quanta 64, 128, 256: within a level in order of arrival, whatever the length."""
    engine = engine_of("mlfq")
    for name, num_prompt in (("c1", 129), ("b1", 65), ("a1", 64), ("c2", 256), ("b2", 128), ("a2", 1)):
        add(engine, Job(name, 1, num_prompt=num_prompt))
    assert engine.waiting == ["a1", "a2", "b1", "b2", "c1", "c2"]


def test_the_last_level_takes_what_is_longer() -> None:
    engine = engine_of("mlfq", "scheduler.policy.levels=2")
    for name, num_prompt in (("long", 5000), ("short", 100)):
        add(engine, Job(name, 1, num_prompt=num_prompt))
    assert engine.waiting == ["long", "short"]


@pytest.mark.parametrize("mode", ["pause", "recompute"])
def test_a_used_quantum_makes_it_sink_and_the_next_one_is_twice_as_large(mode: str) -> None:
    """Quanta 4, 8, 16. Within a level nobody is displaced: b goes on where a has sunk to already."""
    engine = engine_of("mlfq", "scheduler.policy.quantum=4", f"scheduler.preempt_mode={mode}")
    assert play(engine, [Job("a", 20), Job("b", 20)]).turns == ["a4", "b12", "a16", "b8"]


def test_a_newcomer_displaces_what_has_sunk() -> None:
    engine = engine_of("mlfq", "scheduler.policy.quantum=4", PAUSE)
    jobs = [Job("a", 10), Job("early", 2, at=3), Job("late", 2, at=8)]
    assert play(engine, jobs).turns == ["a4", "early2", "a2", "late2", "a4"]


def test_what_is_computed_again_uses_up_no_quantum() -> None:
    """Quanta 8, 16: after six of its eight tokens the prompt of eight and they are lost, and two are left still."""
    engine = engine_of("mlfq", "scheduler.policy.quantum=8", "scheduler.max_num_batched_tokens=8")
    jobs = [Job("a", 30, num_prompt=9), Job("b", 2, at=6)]
    assert play(engine, jobs).turns[1] == "b2"  # level 0 against level 1
    assert engine.request("a").num_preemptions == 1


def starving(*overrides: str, steps: int) -> list[int]:
    """The steps in which a request of the second level runs, under a stream of those of the first."""
    engine = engine_of("mlfq", "scheduler.policy.quantum=4", PAUSE, *overrides)
    add(engine, Job("waiter", 40, num_prompt=5))
    ran = []
    for step in range(steps):
        if step % 2 == 0:
            add(engine, Job(f"s{step}", 2))
        engine.step()
        if "waiter" in engine.scheduled:
            ran.append(step)
    engine.close()
    return ran


def test_waiting_lifts_it_and_gives_it_a_new_quantum() -> None:
    """It comes at second 0 and is of level 0 at second 10; then it has four tokens, and what came waits for them."""
    assert starving("scheduler.policy.starve_seconds=10", steps=18) == [10, 11, 12, 13]
    assert starving("scheduler.policy.starve_seconds=1000", steps=60) == []


# LAS


def test_the_one_served_least_runs_until_it_is_a_quantum_ahead() -> None:
    """Prompt of one token: a has 7 tokens at step 6, of quantum 4 the second; b runs until it begins its third."""
    engine = engine_of("las", "scheduler.policy.quantum=4", PAUSE)
    assert play(engine, [Job("a", 12), Job("b", 12, at=6)]).turns == ["a6", "b7", "a5", "b5", "a1"]


def test_in_las_a_prefill_is_not_cut_where_that_would_lose_it() -> None:
    def turns(mode: str) -> list[str]:
        engine = engine_of("las", "scheduler.policy.quantum=4", f"scheduler.preempt_mode={mode}",
                           "scheduler.max_num_batched_tokens=8")  # fmt: skip
        return play(engine, [Job("a", 2, num_prompt=32), Job("b", 2, at=2)]).turns

    assert turns("pause") == ["a2", "b2", "a3"]
    assert turns("recompute")[:2] == ["a4", "b2"]


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_in_las_a_prefill_that_lost_its_blocks_has_the_service_that_it_got(mode: str) -> None:
    """Ten blocks, eight of them the prefill's: the other one takes them at its ninth token; a newcomer goes first."""
    small = ("kv_cache.num_blocks=10", "kv_cache.block_size=4", "kv_cache.host_memory=4KiB", "model.max_model_len=40")
    chunks = ("scheduler.policy.quantum=4", "scheduler.long_prefill_token_threshold=4")
    engine = engine_of("las", f"scheduler.preempt_mode={mode}", *small, *chunks, places=2)
    add(engine, Job("decode", 30))
    for _ in range(5):
        engine.step()
    add(engine, Job("prefill", 2, num_prompt=32))
    while "prefill" not in engine.waiting or not engine.stats.num_preemptions:
        engine.step()
    add(engine, Job("new", 2))
    assert engine.waiting == ["new", "prefill"]
    engine.run()


# PLAS


def test_requests_of_a_session_that_was_served_much_wait_behind_a_new_session() -> None:
    engine = engine_of("plas", "scheduler.policy.quantum=8")
    add(engine, Job("first", 20, session="agent"))
    engine.run()
    add(engine, Job("again", 2, session="agent"))  # of 20 tokens: the third level
    add(engine, Job("alone", 2))
    add(engine, Job("other", 2, session="chat"))
    assert engine.waiting == ["alone", "other", "again"]


def test_sessions_of_two_clients_that_have_the_same_name_are_two() -> None:
    engine = engine_of("plas", "scheduler.policy.quantum=8")
    engine.add([1], "first", client="a", session="1", max_tokens=20, true_output_tokens=20)
    engine.run()
    for client in ("a", "b", None):
        engine.add([1], f"of {client}", client=client, session="1", max_tokens=2, true_output_tokens=2)
    assert engine.waiting == ["of None", "of b", "of a"]


def test_a_session_sinks_with_all_of_its_requests_while_they_run() -> None:
    """Two at once: those of one session have two tokens a step, and are of the second level after four steps."""
    engine = engine_of("plas", "scheduler.policy.quantum=8", PAUSE, places=2)
    jobs = [Job("a", 20, session="agent"), Job("b", 20, session="agent"), Job("c", 3, at=3), Job("d", 3, at=6)]
    assert play(engine, jobs).turns == ["a+b4", "a+c2", "c+d1", "a+d2", "a+b12", "b4"]


def test_being_there_for_long_makes_up_for_a_level() -> None:
    def order(arrival: float) -> list[str]:
        engine = engine_of("plas", "scheduler.policy.quantum=8", "scheduler.policy.ageing_seconds=10")
        add(engine, Job("first", 10, session="agent"))
        engine.run()
        engine.add([1], "second", session="agent", arrival=20.0)
        engine.add([1], "new", session="chat", arrival=arrival)
        return engine.waiting

    assert (order(29.0), order(31.0)) == (["new", "second"], ["second", "new"])


def test_the_session_that_was_served_last_the_longest_ago_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plas, "_MOST_SESSIONS", 2)
    engine = engine_of("plas", "scheduler.policy.quantum=2")
    for session in ("one", "two", "one", "three"):
        add(engine, Job(f"{session}{len(engine.requests)}", 8, session=session))
        engine.run()
    for session in ("one", "two", "three"):
        add(engine, Job(session, 1, session=session))
    assert engine.waiting == ["two", "three", "one"]


# HRRN


def waiting_by_ratio(arrivals: dict[str, tuple[int, int]], *overrides: str, cached: int = 0) -> list[str]:
    """Who is admitted in which order, of requests by (step of arrival, prompt), after one that runs for 50 steps."""
    engine = engine_of("hrrn", "kv_cache.enable_prefix_caching=true", *overrides)
    if cached:
        engine.add(range(cached), max_tokens=1)
        engine.run()
    engine.add([7], "runner", max_tokens=50)
    engine.step()
    order: list[str] = ["runner"]
    for step in range(500):
        for name, (at, num_prompt) in arrivals.items():
            if at == step:
                engine.add(range(num_prompt), name, max_tokens=1)
        if not engine.has_requests:
            break
        engine.step()
        order += [name for name in engine.scheduled if name not in order]
    engine.close()
    return order[1:]


@pytest.mark.parametrize(("at", "order"), [(30, ["b", "a"]), (40, ["a", "b"])])
def test_the_highest_ratio_of_tokens_since_arrival_to_own_tokens_is_next(at: int, order: list[str]) -> None:
    """Of the runner's 50 tokens a sees 49, for its 40; b sees 19 if it comes at step 30 and 9 at 40, for its ten."""
    assert waiting_by_ratio({"a": (0, 40), "b": (at, 10)}) == order


def test_tokens_that_a_cache_has_are_none_of_its_own() -> None:
    """32 of a's 40 tokens: 49 / 8. Of b's ten there is no whole block: 19 / 10."""
    assert waiting_by_ratio({"a": (0, 40), "b": (30, 10)}, cached=32) == ["a", "b"]


def test_of_more_than_a_window_the_order_is_that_of_arrival() -> None:
    assert waiting_by_ratio({"a": (0, 40), "b": (30, 10)}, "scheduler.policy.window=1") == ["a", "b"]
    assert waiting_by_ratio({"a": (0, 40), "b": (30, 10)}, "scheduler.policy.window=2") == ["b", "a"]


@pytest.mark.parametrize(
    "policy", ["sjf", "srpt", "mlfq", "las", "plas", "random", "longest-first", "hrrn", "priority"]
)
def test_no_state_of_a_request_outlives_it(policy: str) -> None:
    engine = EngineHarness([f"scheduler={policy}", "scheduler.max_num_seqs=2", "kv_cache.num_blocks=40",
                            "kv_cache.block_size=2", "model.max_model_len=60"])  # fmt: skip
    for number in range(8):
        engine.add([number] * 9, f"r{number}", max_tokens=20, session="s")
        engine.step()
    engine.finish(["r1", "r7"])
    engine.run()
    assert engine.policy is not None
    kept = {
        name: value for name, value in vars(engine.policy).items() if isinstance(value, dict) and name != "_service"
    }
    assert not any(kept.values()), kept
