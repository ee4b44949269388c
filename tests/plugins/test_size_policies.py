"""sjf, srpt, longest-first and random: orders by size and by chance, in figures worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.errors import ConfigError
from tokenyard.testing import EngineHarness
from turn_taking import Job, engine_of, play, started

PAUSE = "scheduler.preempt_mode=pause"

# Sizes: a 28, b 12, c 21, d 11.
MIXED = [Job("a", 20, num_prompt=8), Job("b", 10, num_prompt=2), Job("c", 1, num_prompt=20), Job("d", 9, num_prompt=2)]
# Of one step for each output token.
TOGETHER = [Job("a", 5), Job("b", 3), Job("c", 1)]


@pytest.mark.parametrize(
    ("policy", "overrides", "order"),
    [
        ("sjf", [], "dbca"),
        ("sjf", ["scheduler.policy.output_weight=0"], "bdac"),
        ("sjf", ["scheduler.policy.output_weight=0.1"], "dbac"),
        ("srpt", [PAUSE], "dbca"),
        ("longest-first", [], "acbd"),
        ("longest-first", ["scheduler.policy.output_weight=0"], "cabd"),
    ],
)
def test_requests_that_are_all_there_start_by_their_size(policy: str, overrides: list[str], order: str) -> None:
    assert started(engine_of(policy, *overrides), MIXED) == list(order)


@pytest.mark.parametrize(
    ("policy", "ends"),
    [
        ("fcfs", {"a": 5, "b": 8, "c": 9}),
        ("sjf", {"c": 1, "b": 4, "a": 9}),
        ("srpt", {"c": 1, "b": 4, "a": 9}),
        ("longest-first", {"a": 5, "b": 8, "c": 9}),
    ],
)
def test_the_shortest_first_has_the_least_mean_time(policy: str, ends: dict[str, int]) -> None:
    """14 steps in sum instead of 22."""
    assert play(engine_of(policy), TOGETHER).ended == ends


def test_a_size_is_what_the_predictor_says() -> None:
    """The same requests, whose outputs end long before their limit: `max_tokens` cannot know, an oracle does."""

    def order(predictor: str) -> list[str]:
        engine = engine_of("sjf", f"scheduler.predictor={predictor}")
        for name, limit, truth in (("a", 50, 2), ("b", 40, 30)):
            engine.add([1], name, max_tokens=limit, true_output_tokens=truth)
        return engine.waiting

    assert (order("max_tokens"), order("oracle")) == (["b", "a"], ["a", "b"])


@pytest.mark.parametrize(("residual", "order"), [("true", ["warm", "cold"]), ("false", ["cold", "warm"])])
def test_residual_leaves_out_what_is_cached(residual: str, order: list[str]) -> None:
    engine = engine_of("sjf", "kv_cache.enable_prefix_caching=true", f"scheduler.policy.residual={residual}")
    engine.add(range(48), max_tokens=1)
    engine.run()
    engine.add(range(60), "warm", max_tokens=1)  # 48 of its tokens are cached, 12 are not
    engine.add(range(100, 120), "cold", max_tokens=1)
    assert engine.waiting == order


@pytest.mark.parametrize("policy", ["sjf", "srpt"])
@pytest.mark.parametrize(("arrival", "order"), [(79.0, ["short", "long"]), (81.0, ["long", "short"])])
def test_ageing_is_worth_a_token_in_so_many_seconds(policy: str, arrival: float, order: list[str]) -> None:
    """40 tokens more are worth 80 seconds."""
    engine = engine_of(policy, "scheduler.policy.ageing_seconds=2")
    engine.add([1], "long", max_tokens=50, arrival=0.0)
    engine.add([1], "short", max_tokens=10, arrival=arrival)
    assert engine.waiting == order


# SRPT


def test_a_shorter_arrival_has_its_turn_at_once_and_the_longer_one_goes_on_after_it() -> None:
    jobs = [Job("long", 100), Job("short", 5, at=10)]
    played = play(engine_of("srpt", PAUSE), jobs)
    assert played.turns == ["long10", "short5", "long90"]


def test_without_a_pause_the_longer_one_is_computed_again_in_one_prefill() -> None:
    engine = engine_of("srpt")
    played = play(engine, [Job("long", 100), Job("short", 5, at=10)])
    assert played.turns == ["long10", "short5", "long90"]  # the eleven tokens come with the step of the next one
    assert engine.request("long").num_preemptions == 1
    # Prompts and outputs but the last tokens, and the ten that were lost.
    assert engine.stats.num_preemptions == 1


@pytest.mark.parametrize(("outputs", "order"), [(39, ["b", "c", "a"]), (60, ["b", "a", "c"])])
def test_what_was_swapped_out_need_not_be_computed_again(outputs: int, order: list[str]) -> None:
    """After 20 of its 60 tokens 1019 tokens are known, of which 1016 are in whole blocks: 3 and 40 are left."""
    swap = ("scheduler.preempt_mode=swap", "kv_cache.host_memory=4KiB", "kv_cache.block_size=4")
    jobs = [Job("a", 60, num_prompt=1000), Job("b", 10, at=20), Job("c", outputs, at=21)]
    played = play(engine_of("srpt", *swap), jobs)
    assert sorted(played.ended, key=played.ended.__getitem__) == order


def test_what_has_as_much_left_keeps_its_turn() -> None:
    # After 90 steps ten tokens are left.
    assert play(engine_of("srpt", PAUSE), [Job("long", 100), Job("equal", 10, at=90)]).turns == ["long100", "equal10"]
    assert play(engine_of("srpt", PAUSE), [Job("long", 100), Job("less", 9, at=90)]).turns == [
        "long90",
        "less9",
        "long10",
    ]


def test_of_several_that_run_the_one_with_most_left_makes_way() -> None:
    jobs = [Job("a", 30), Job("b", 40), Job("c", 20), Job("new", 10, at=5)]
    played = play(engine_of("srpt", PAUSE, places=3), jobs)
    assert played.turns[:3] == ["a+b+c5", "a+c+new10", "a+b+c5"]


@pytest.mark.parametrize(
    ("overrides", "at", "is_displaced"),
    [
        ([], 79, True),  # 0.8 of 100
        ([], 80, False),
        (["scheduler.policy.limit=0.5"], 49, True),
        (["scheduler.policy.limit=0.5"], 50, False),
        (["scheduler.policy.limit=0"], 1, False),
        (["scheduler.policy.limit=1"], 95, True),
        ([PAUSE], 95, True),
        ([PAUSE, "scheduler.policy.limit=0.8"], 80, False),
    ],
)
def test_nobody_is_displaced_who_has_that_share_of_its_output(
    overrides: list[str], at: int, is_displaced: bool
) -> None:
    engine = engine_of("srpt", *overrides)
    play(engine, [Job("long", 100), Job("short", 1, at=at)])
    assert (engine.request("long").num_preemptions > 0) is is_displaced


def test_with_ageing_a_request_that_has_been_there_for_long_is_not_displaced() -> None:
    """A token for each second: after 30 of them 70 tokens are left, that compare as 40 of a newcomer."""
    for outputs, turns in ((41, ["long100", "new41"]), (39, ["long30", "new39", "long70"])):
        engine = engine_of("srpt", PAUSE, "scheduler.policy.ageing_seconds=1")
        assert play(engine, [Job("long", 100), Job("new", outputs, at=30)]).turns == turns


def exact_srpt(jobs: Sequence[Job]) -> dict[str, int]:
    """One unit of work a step for whoever has least left; who runs goes before its equals, then who came first."""
    left = {job.name: job.num_outputs for job in jobs}
    ended: dict[str, int] = {}
    step, running = 0, ""
    while len(ended) < len(jobs):
        there = [job for job in jobs if job.at <= step and job.name not in ended]
        step += 1
        if there:
            running = min(there, key=lambda job: (left[job.name], job.name != running, job.at, job.name)).name
            left[running] -= 1
            if not left[running]:
                ended[running] = step
    return ended


@settings(max_examples=20, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(0, 12), st.sampled_from([1, 2, 5, 20])), min_size=1, max_size=12))
def test_with_an_oracle_pauses_and_one_place_it_is_exact(rows: list[tuple[int, int]]) -> None:
    jobs, at = [], 0
    for number, (gap, outputs) in enumerate(rows):
        at += gap
        jobs.append(Job(f"r{number:02}", outputs, at=at))
    assert play(engine_of("srpt", PAUSE), jobs).ended == exact_srpt(jobs)


# Chance


def random_order(seed: int) -> list[str]:
    engine = engine_of("random", f"seed={seed}")
    for number in range(12):
        engine.add([number], f"r{number:02}", max_tokens=1)
    return engine.waiting


def test_a_random_order_is_that_of_the_seed_and_not_that_of_arrival() -> None:
    orders = [random_order(seed) for seed in (0, 1, 2)]
    assert random_order(1) == orders[1]
    assert len({*map(tuple, orders)}) == 3
    assert sorted(orders[0]) not in orders


def test_a_preempted_request_keeps_its_random_place() -> None:
    engine = EngineHarness(
        ["scheduler=random", "kv_cache.num_blocks=8", "kv_cache.block_size=2", "kv_cache.enable_prefix_caching=false",
         "model.max_model_len=16"]
    )  # fmt: skip
    for number in range(4):
        engine.add([number], f"r{number}", max_tokens=12)
    order = engine.waiting
    while not engine.stats.num_preemptions:
        engine.step()
    waiting = engine.waiting
    assert waiting == [name for name in order if name in waiting]


@pytest.mark.parametrize(
    "override",
    [
        "scheduler=sjf scheduler.policy.output_weight=-1",
        "scheduler=sjf scheduler.policy.output_weight=nan",
        "scheduler=sjf scheduler.policy.ageing_seconds=0",
        "scheduler=srpt scheduler.policy.limit=1.1",
        "scheduler=srpt scheduler.policy.ageing_seconds=inf",
        "scheduler=srpt scheduler.policy.output_weight=0",
        "scheduler=longest-first scheduler.policy.output_weight=inf",
        "scheduler=mlfq scheduler.policy.levels=0",
        "scheduler=mlfq scheduler.policy.starve_seconds=nan",
        "scheduler=las scheduler.policy.quantum=0",
        "scheduler=plas scheduler.policy.ageing_seconds=-1",
        "scheduler=hrrn scheduler.policy.window=0",
    ],
)
def test_an_option_out_of_range_is_refused_at_launch_by_its_key(override: str) -> None:
    key, _, value = override.split(".policy.")[1].partition("=")
    with pytest.raises(ConfigError, match=rf"scheduler\.policy: {key}={value}.* is not valid: it must be"):
        EngineHarness(override.split())
