"""TokenTimes: gaps between a request's tokens, and an engine that behaves as without it."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenyard.bench import token_times
from tokenyard.bench.token_times import TokenTimes
from tokenyard.engine_outputs import EngineCoreOutputs, FinishedRequest
from tokenyard.interfaces import EngineCore
from tokenyard.request import FinishReason

_REASON = FinishReason.LENGTH


class Scripted:
    """Of an EngineCore only `step`: each gives the tokens of one row, by request id."""

    def __init__(self, rows: Sequence[Mapping[str, int]], ends: Mapping[int, Sequence[str]] = {}) -> None:
        self._steps = iter(enumerate(rows))
        self._ends = ends

    def step(self) -> EngineCoreOutputs:
        number, row = next(self._steps)
        return EngineCoreOutputs(
            request_ids=list(row),
            num_tokens=np.array(list(row.values()), dtype=np.int32),
            token_ids=np.zeros(sum(row.values()), dtype=np.int32),
            finished=[FinishedRequest(request_id=name, reason=_REASON) for name in self._ends.get(number, ())],
        )


def watch(rows: Sequence[Mapping[str, int]], ends: Mapping[int, Sequence[str]] = {}) -> list[float]:
    """The gaps when the steps end at 1, 2, 3, ... seconds."""
    seconds = iter(range(1, len(rows) + 1))
    core = cast("EngineCore", Scripted(rows, ends))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_times, "perf_counter", lambda: float(next(seconds)))
        times = TokenTimes(core)
        for row in rows:
            assert core.step().request_ids == list(row)
    return times.gaps


def test_the_first_token_has_no_gap_and_a_step_without_tokens_lengthens_the_next_one() -> None:
    assert watch([{"a": 1}, {"a": 1, "b": 1}, {}, {"b": 1}, {"a": 1}]) == [1.0, 2.0, 3.0]


def test_several_tokens_of_one_step_came_at_once() -> None:
    assert watch([{"a": 3}, {"a": 2}]) == [1.0]


def test_a_request_that_has_ended_leaves_nothing_behind() -> None:
    assert watch([{"a": 1}, {"a": 1}, {}, {"a": 1}], {1: ["a"]}) == [1.0]


@given(st.lists(st.sets(st.sampled_from("abc")), max_size=12))
def test_the_gaps_of_a_request_add_up_to_the_time_from_its_first_to_its_last_token(steps: list[set[str]]) -> None:
    at = {name: [number for number, row in enumerate(steps) if name in row] for name in "abc"}
    expected = sum(numbers[-1] - numbers[0] for numbers in at.values() if numbers)
    gaps = watch([dict.fromkeys(sorted(row), 1) for row in steps])
    assert sum(gaps) == expected
    assert len(gaps) == sum(max(0, len(numbers) - 1) for numbers in at.values())


def test_an_engine_that_cannot_be_watched_is_told_and_runs(caplog: pytest.LogCaptureFixture) -> None:
    class Closed:
        __slots__ = ()

        def step(self) -> str:
            return "done"

    core = Closed()
    with caplog.at_level(logging.WARNING):
        times = TokenTimes(cast("EngineCore", core))
    assert "Closed cannot be watched" in caplog.text
    assert (core.step(), times.gaps) == ("done", [])
