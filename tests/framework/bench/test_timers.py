"""What a timer costs, and timers around the mechanism's own parts."""

from __future__ import annotations

import logging

import pytest
from tokenyard.bench.instrument import Instrument
from tokenyard.bench.timers import seconds_per_call
from tokenyard.plugin_times import PluginPoint
from tokenyard.stopwatch import Stopwatch


def test_the_cost_of_a_timer_is_never_negative() -> None:
    assert seconds_per_call() >= 0


def test_a_part_that_takes_no_timers_is_told_and_works_without(caplog: pytest.LogCaptureFixture) -> None:
    class Closed:
        __slots__ = ()

        def step(self) -> str:
            return "done"

    part, stopwatch = Closed(), Stopwatch[PluginPoint]()
    with caplog.at_level(logging.WARNING):
        Instrument(stopwatch, {"engine": "closed"}).time_calls(part, "engine", ("step",))
    assert "Closed takes no timers" in caplog.text
    assert part.step() == "done"
    assert stopwatch.tallies()[PluginPoint("engine", "closed", "step")].num_calls == 0
