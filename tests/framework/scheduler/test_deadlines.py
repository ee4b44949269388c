"""Deadlines: who is overdue, without a look at anybody else."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.request import EngineCoreRequest
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler.deadlines import Deadlines
from tokenyard.scheduler.request_state import Request


def request(request_id: str, deadline: float | None) -> Request:
    core = EngineCoreRequest(
        request_id=request_id,
        prompt_token_ids=np.array([1], dtype=np.int32),
        params=SamplingParams(),
        arrival_time=0.0,
        deadline=deadline,
    )
    return Request(core, max_total_tokens=9)


@given(
    deadlines=st.lists(st.none() | st.integers(0, 20), max_size=20),
    ended=st.sets(st.integers(0, 19)),
    now=st.integers(-1, 21),
)
def test_exactly_the_live_requests_that_are_overdue_come_in_order(
    deadlines: list[int | None], ended: set[int], now: int
) -> None:
    alive: dict[str, Request] = {}
    watched = Deadlines(alive)
    for i, deadline in enumerate(deadlines):
        alive[str(i)] = request(str(i), deadline)
        watched.add(alive[str(i)])
    for i in ended:
        alive.pop(str(i), None)
    live = sorted((one.deadline, int(name)) for name, one in alive.items() if one.deadline is not None)
    assert watched.next_time() == (live[0][0] if live else None)
    overdue = watched.pop_overdue(now)
    assert [int(one.request_id) for one in overdue] == [i for deadline, i in live if deadline <= now]
    assert not watched.pop_overdue(now)
    assert watched.next_time() == next((deadline for deadline, _ in live if deadline > now), None)


def test_an_id_that_is_used_again_is_another_request() -> None:
    alive = {"a": request("a", 5.0)}
    watched = Deadlines(alive)
    watched.add(alive["a"])
    alive["a"] = request("a", None)
    assert watched.next_time() is None
    assert watched.pop_overdue(9.0) == []


def test_requests_that_ended_do_not_pile_up() -> None:
    alive: dict[str, Request] = {}
    watched = Deadlines(alive)
    for i in range(5000):
        alive[str(i)] = request(str(i), 1e9 + i)
        watched.add(alive[str(i)])
        del alive[str(i)]
    assert len(watched) < 200
