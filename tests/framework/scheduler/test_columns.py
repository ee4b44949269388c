"""What policies are told in columns is what the rows and views say one by one."""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard import PolicyDescriptor
from tokenyard.arrays import FloatArray, LongArray
from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView, SchedulingPolicy, StepOutcomes, keep_turns
from tokenyard.testing import EngineHarness, catalogue_with

COLUMNS = (
    "arrival_time",
    "priority",
    "num_prompt_tokens",
    "num_output_tokens",
    "num_computed_tokens",
    "attained_service",
    "is_paused",
)
SEEDS = st.integers(0, 2**16)


class Watcher(SchedulingPolicy):
    """Compares what it is told in each step, and displaces at random so that much happens."""

    def __init__(self, options: object, context: PolicyContext) -> None:
        self.kept: list[tuple[StepOutcomes, list[object]]] = []

    def on_step(self, outcomes: StepOutcomes, view: SchedulerView) -> None:
        # Columns first: nothing may have been made from the rows.
        columns = [
            list(outcomes.requests),
            *(
                column.tolist()
                for column in (
                    outcomes.num_computed_tokens,
                    outcomes.num_new_tokens,
                    outcomes.is_first_token,
                    outcomes.is_finished,
                )
            ),
        ]
        by_client = outcomes.sum_by_client(outcomes.num_new_tokens)
        by_session = outcomes.sum_by_session(outcomes.num_computed_tokens)
        rows = list(outcomes)
        assert [list(column) for column in zip(*rows, strict=True)] == columns
        assert all(
            row.is_first_token == (0 < row.num_new_tokens == row.request.num_output_tokens)
            and row.num_computed_tokens > 0
            for row in rows
        )
        clients: Counter[str | None] = Counter()
        sessions: Counter[tuple[str | None, str]] = Counter()
        for row in rows:
            clients[row.request.client_id] += row.num_new_tokens
            if row.request.session_id is not None:
                sessions[row.request.client_id, row.request.session_id] += row.num_computed_tokens
        assert (by_client, by_session) == (clients, sessions)
        assert (len(outcomes), outcomes[-1], outcomes[1:]) == (len(rows), rows[-1], rows[1:])
        self.kept.append((outcomes, [*rows]))

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        columns = view.running_columns
        assert list(view.running) == list(running)
        for name in COLUMNS:
            assert getattr(columns, name).tolist() == [getattr(one, name) for one in running], name
        return [one for one in running if view.rng.random() < 0.9]


def traffic(engine: EngineHarness, seed: int, num_requests: int = 14) -> None:
    """Requests of three clients that come, go, end early and are preempted."""
    draw = Random(seed)
    for number in range(num_requests):
        engine.add(
            [draw.randrange(1000) for _ in range(draw.randint(1, 14))],
            str(number),
            draw.randint(-1, 2),
            client=draw.choice((None, "a", "b")),
            session=draw.choice((None, None, "one", "two")),
            max_tokens=draw.randint(1, 9),
            ignore_eos=True,
        )
        for _ in range(draw.randint(0, 3)):
            engine.advance(draw.random())
            engine.step()
        if draw.random() < 0.2:
            engine.finish(str(draw.randint(0, number)))
    engine.run()


def small(name: str, loop: str, *overrides: str, policy: type[SchedulingPolicy] | None = None) -> EngineHarness:
    catalogue = None
    if policy is not None:
        catalogue = catalogue_with(PolicyDescriptor(name=name, api_version=(1, 7), factory=policy))
    limits = ("scheduler.max_num_seqs=4", "scheduler.max_num_batched_tokens=12", "kv_cache.num_blocks=14")
    return EngineHarness(
        [f"scheduler={name}", f"engine={loop}", *limits, "kv_cache.block_size=4", *overrides], catalogue=catalogue
    )


@settings(max_examples=8, deadline=None)
@given(seed=SEEDS, loop=st.sampled_from(["sync", "overlap"]), mode=st.sampled_from(["recompute", "pause"]))
def test_columns_say_what_rows_and_views_do_and_stay_as_they_are(seed: int, loop: str, mode: str) -> None:
    with small("watcher", loop, f"scheduler.preempt_mode={mode}", policy=Watcher) as engine:
        traffic(engine, seed)
        policy = engine.policy
        assert isinstance(policy, Watcher)
        assert policy.kept
        for outcomes, rows in policy.kept:
            assert list(outcomes) == rows


def test_what_is_first_read_later_is_what_was_true_then() -> None:
    kept: list[StepOutcomes] = []

    class Keeper(SchedulingPolicy):
        def __init__(self, options: object, context: PolicyContext) -> None: ...

        def on_step(self, outcomes: StepOutcomes, view: SchedulerView) -> None:
            kept.append(outcomes)

    with small("keeper", "sync", policy=Keeper) as engine:
        engine.add([1, 2, 3], "a", client="me", max_tokens=2, ignore_eos=True)
        engine.run()
        engine.add([4, 5, 6, 7], "b", client="you", max_tokens=2, ignore_eos=True)
        engine.run()
    first, second, *_ = kept
    assert [one.request.request_id for one in first] == ["a"]
    assert (first.is_first_token.tolist(), second.is_first_token.tolist()) == ([True], [False])
    assert (first.is_finished.tolist(), second.is_finished.tolist()) == ([False], [True])
    assert [dict(one.sum_by_client(one.num_computed_tokens)) for one in kept] == [
        {"me": 3},
        {"me": 1},
        {"you": 4},
        {"you": 1},
    ]


def test_a_policy_cannot_change_the_columns_of_a_step() -> None:
    told: list[StepOutcomes] = []

    class Writer(SchedulingPolicy):
        def __init__(self, options: object, context: PolicyContext) -> None: ...

        def on_step(self, outcomes: StepOutcomes, view: SchedulerView) -> None:
            told.append(outcomes)

    with small("writer", "sync", policy=Writer) as engine:
        engine.add([1, 2, 3], max_tokens=1)
        engine.run()
    (outcomes,) = told
    for column in (outcomes.num_computed_tokens, outcomes.num_new_tokens, outcomes.is_first_token):
        with pytest.raises(ValueError, match="read-only"):
            column[0] = 7
    with pytest.raises(ValueError, match="2 values for the 1 rows of a step"):
        outcomes.sum_by_client(np.array([1, 2]))


def test_many_clients_are_told_apart_after_their_names_were_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenyard.scheduler.outcomes._MOST_UNUSED", 0)
    served: Counter[str | None] = Counter()

    class Server(SchedulingPolicy):
        def __init__(self, options: object, context: PolicyContext) -> None: ...

        def on_step(self, outcomes: StepOutcomes, view: SchedulerView) -> None:
            served.update(outcomes.sum_by_client(outcomes.num_new_tokens))

    with small("server", "sync", policy=Server) as engine:
        for number in range(60):
            engine.add([1, 2, 3], client=f"client {number}", max_tokens=2, ignore_eos=True)
        engine.run()
    assert served == {f"client {number}": 2 for number in range(60)}


@pytest.mark.parametrize("mode", ["recompute", "pause"])
@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("priority", ["scheduler.policy.preempt=true", "scheduler.policy.ageing_seconds=0.7"]),
        ("srpt", ["scheduler.policy.ageing_seconds=0.3"]),
        ("las", ["scheduler.policy.quantum=3"]),
        ("plas", ["scheduler.policy.quantum=4", "scheduler.policy.ageing_seconds=1.7"]),
        ("mlfq", ["scheduler.policy.quantum=2", "scheduler.policy.starve_seconds=0.9"]),
    ],
)
def test_keys_in_a_column_are_those_of_each_request(
    name: str, overrides: list[str], mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = Counter[bool]()

    def compare(running, view, limits, key, *, keys: FloatArray | LongArray, **more):  # type: ignore[no-untyped-def]
        for one, value in zip(running, keys.tolist(), strict=True):
            assert key(one) == (value,)
            compared[one.is_paused] += 1
        return keep_turns(running, view, limits, key, keys=keys, **more)

    monkeypatch.setattr(importlib.import_module(f"tokenyard_plugins.{name}"), "keep_turns", compare)
    for seed in range(3):
        with small(name, "overlap", f"scheduler.preempt_mode={mode}", *overrides) as engine:
            traffic(engine, seed, 20)
    assert compared[False] > 50
    assert (compared[True] > 0) == (mode == "pause" and name != "priority")  # few wait while somebody is paused


def test_keys_of_others_than_run_are_refused() -> None:
    context = PolicyContext(seed=0, max_num_seqs=1, max_num_batched_tokens=1)
    with pytest.raises(ValueError, match="keep_turns was given 1 keys of 0 requests"):
        keep_turns([], None, context, lambda one: (0,), keys=np.zeros(1))  # type: ignore[arg-type]
