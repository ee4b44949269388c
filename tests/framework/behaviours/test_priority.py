"""Section 3 of the public engine behaviours, and the choice that SCH-06 asks for: priority orders the line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.errors import ConfigError, ValidationError
from tokenyard.testing import EngineHarness

MakeHarness = Callable[..., EngineHarness]


def add_all(engine: EngineHarness, priorities: list[int], arrivals: list[float] | None = None) -> list[str]:
    times = arrivals or [0.0] * len(priorities)
    return [
        engine.add([100 + i] * 8, priority=priority, arrival=arrival, max_tokens=4)
        for i, (priority, arrival) in enumerate(zip(priorities, times, strict=True))
    ]


def ended_in_order(engine: EngineHarness) -> list[str]:
    """Runs to the end; ids in order of their ends."""
    ended = []
    while engine.has_requests:
        ended += [end.request_id for end in engine.step().finished]
    return ended


@pytest.mark.parametrize(
    ("priorities", "arrivals", "expected"),
    [
        pytest.param([2, 0, 1], None, ["1", "2", "0"], id="p1"),
        pytest.param([0, 0, 0], [3.0, 1.0, 2.0], ["1", "2", "0"], id="p2"),
        pytest.param([2, 1, 1, 0], [1.0, 3.0, 2.0, 4.0], ["3", "2", "1", "0"], id="p3"),
        pytest.param([7, 7, 7, 7], [0.1, 0.4, 0.2, 0.3], ["0", "2", "3", "1"], id="p11"),
    ],
)
def test_the_most_urgent_come_first_then_by_arrival(
    harness: MakeHarness, priorities: list[int], arrivals: list[float] | None, expected: list[str]
) -> None:
    """P1, P2, P3, P11."""
    engine = harness("scheduler=priority")
    add_all(engine, priorities, arrivals)
    assert engine.waiting == expected
    engine.step()
    assert list(engine.scheduled) == expected


def test_p5_an_urgent_request_joins_without_preemption_where_there_is_room(harness: MakeHarness) -> None:
    engine = harness("scheduler=priority")
    low = add_all(engine, [5, 5])
    engine.step()
    high = engine.add([1] * 8, priority=0)
    engine.step()
    assert engine.running == [*low, high]
    assert (engine.waiting, engine.stats.num_preemptions) == ([], 0)


@pytest.mark.parametrize(
    ("priorities", "arrivals", "running", "waiting"),
    [
        pytest.param([3, 2, 0], None, "2", ["1", "0"], id="p6"),
        pytest.param([1, 1, 1], [3.0, 1.0, 2.0], "1", ["2", "0"], id="p7"),
    ],
)
def test_one_place_goes_to_the_most_urgent(
    harness: MakeHarness, priorities: list[int], arrivals: list[float] | None, running: str, waiting: list[str]
) -> None:
    """P6, P7."""
    engine = harness("scheduler=priority", "scheduler.max_num_seqs=1")
    add_all(engine, priorities, arrivals)
    engine.step()
    assert (engine.running, engine.waiting) == ([running], waiting)


def test_p9_requests_run_one_by_one_in_order_of_priority(harness: MakeHarness) -> None:
    engine = harness("scheduler=priority", "scheduler.max_num_seqs=1")
    priorities = [5, 1, 8, 3, 2, 7, 4, 6]
    add_all(engine, priorities)
    order = []
    while engine.has_requests:
        engine.step()
        if engine.running and engine.running[0] not in order:
            order.append(engine.running[0])
    assert [priorities[int(name)] for name in order] == list(range(1, 9))


def test_sch_06_priority_orders_the_line_and_displaces_nobody_from_a_full_batch(harness: MakeHarness) -> None:
    engine = harness("scheduler=priority", "scheduler.max_num_seqs=1")
    low = engine.add([1] * 8, priority=5, max_tokens=50)
    engine.step()
    high = engine.add([2] * 8, priority=0, max_tokens=2)
    late = engine.add([3] * 8, priority=1, max_tokens=2)
    for _ in range(48):
        engine.step()
        assert engine.running == [low]
    assert ended_in_order(engine) == [low, high, late]
    assert engine.stats.num_preemptions == 0


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_blocks_are_taken_from_the_least_urgent_wherever_it_stands(harness: MakeHarness, loop: str) -> None:
    engine = harness(
        "scheduler=priority",
        "kv_cache.num_blocks=5",
        "kv_cache.block_size=4",
        "model.max_model_len=20",
        f"engine={loop}",
    )
    low = engine.add([1] * 6, priority=5, max_tokens=12)
    engine.step()
    high = engine.add([2] * 6, priority=0, max_tokens=12)
    assert ended_in_order(engine) == [high, low]
    assert (engine.request(low).num_preemptions, engine.request(high).num_preemptions) == (1, 0)


def test_a_preempted_request_keeps_its_place_in_the_order(harness: MakeHarness) -> None:
    engine = harness("scheduler=priority", "kv_cache.num_blocks=5", "kv_cache.block_size=4", "model.max_model_len=20")
    engine.add([1] * 6, priority=0, max_tokens=12)
    low = engine.add([2] * 6, priority=5, max_tokens=12)
    while not engine.stats.num_preemptions:
        engine.step()
    between = engine.add([3] * 6, priority=3, max_tokens=1, arrival=9.0)
    equal = engine.add([4] * 6, priority=5, max_tokens=1, arrival=9.0)
    assert engine.waiting == [between, low, equal]


def test_ageing_lets_a_request_overtake_what_came_much_later(harness: MakeHarness) -> None:
    engine = harness("scheduler=priority", "scheduler.policy.ageing_seconds=10")
    add_all(engine, [2, 1, 1], [0.0, 9.0, 11.0])  # two levels are worth 20 s, one level 10 s
    assert engine.waiting == ["1", "0", "2"]


@pytest.mark.parametrize("value", ["0", "-1", ".inf", ".nan"])
def test_an_ageing_that_is_no_time_is_refused(harness: MakeHarness, value: str) -> None:
    with pytest.raises(ConfigError, match="ageing_seconds"):
        harness("scheduler=priority", f"scheduler.policy.ageing_seconds={value}")


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(-2, 2), st.integers(1, 60), st.integers(1, 20), st.booleans()), min_size=1, max_size=12
    ),
    num_blocks=st.sampled_from([20, 1000]),
    caching=st.booleans(),
    loop=st.sampled_from(["sync", "overlap"]),
)
def test_p12_a_random_blast_ends_every_request_whole(
    rows: list[tuple[int, int, int, bool]], num_blocks: int, caching: bool, loop: str
) -> None:
    """The harness checks section 9 after every step."""
    engine = EngineHarness(
        [
            "scheduler=priority",
            "scheduler.max_num_seqs=4",
            "scheduler.max_num_batched_tokens=48",
            "model.max_model_len=80",
            "kv_cache.block_size=4",
            f"kv_cache.num_blocks={num_blocks}",
            f"kv_cache.enable_prefix_caching={caching}",
            f"engine={loop}",
        ]
    )
    names = []
    for i, (priority, length, max_tokens, steps) in enumerate(rows):
        shared = length // 2
        tokens = [7] * shared + [100 + i] * (length - shared)
        names.append(engine.add(tokens, priority=priority, max_tokens=max_tokens))
        if steps:
            engine.step()
    engine.run(limit=5000)
    for name, (_, _, max_tokens, _) in zip(names, rows, strict=True):
        assert len(engine.request(name).output_token_ids) == max_tokens
        assert engine.request(name).finish_reason == "length"
    engine.check_idle()
    engine.close()


def test_priorities_are_compared_as_the_integers_they_are(harness: MakeHarness) -> None:
    engine = harness("scheduler=priority")
    add_all(engine, [2**53, 2**53 - 1, -(2**53)], [5.0, 9.0, 99.0])
    assert engine.waiting == ["2", "1", "0"]


@pytest.mark.parametrize("priority", [2**53 + 1, 10**400, 1.5, "high", None])
def test_a_priority_that_is_no_integer_in_range_is_refused(harness: MakeHarness, priority: object) -> None:
    engine = harness("scheduler=priority")
    with pytest.raises(ValidationError, match="priority"):
        engine.add([1, 2], priority=priority)  # type: ignore[arg-type]
    assert not engine.has_requests
