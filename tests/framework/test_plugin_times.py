"""PluginTimes: what plugins take is counted once, by their own names, and is compared with a budget."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import pytest
from tokenyard import ObserverDescriptor, PolicyDescriptor, plugin_times
from tokenyard.clock import VirtualClock
from tokenyard.config import NoOptions
from tokenyard.engine_outputs import EngineCoreOutputs, PluginStats
from tokenyard.errors import ConfigError
from tokenyard.interfaces import Observer, ObserverContext, PolicyContext, RequestView, SchedulerView, SchedulingPolicy
from tokenyard.interfaces.latency import LatencyModel, StepLoad
from tokenyard.launch.compose import load_engine_config
from tokenyard.metrics import metrics_of
from tokenyard.plugin_times import WARNING_INTERVAL, WINDOW, PluginTimes
from tokenyard.scheduler_output import SchedulerOutput
from tokenyard.testing import EngineHarness, catalogue_with


class HandTimer:
    """Stands still until somebody moves it."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> HandTimer:
    """The timer of every engine of the test."""
    timer = HandTimer()
    monkeypatch.setattr(plugin_times, "perf_counter", timer)
    return timer


class SlowPolicy(SchedulingPolicy):
    """Takes 3 ms to order what waits and 1 ms to look back on a step."""

    def __init__(self, timer: HandTimer) -> None:
        self.timer = timer

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        self.timer.seconds += 0.003
        return window

    def on_step(self, outcomes: Sequence[object], view: SchedulerView) -> None:
        self.timer.seconds += 0.001


class SlowObserver(Observer):
    """Takes 2 ms."""

    def __init__(self, timer: HandTimer) -> None:
        self.timer = timer

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        self.timer.seconds += 0.002


def slow_engine(timer: HandTimer, *overrides: str) -> EngineHarness:
    def make_policy(options: NoOptions, context: PolicyContext) -> SchedulingPolicy:
        return SlowPolicy(timer)

    def make_observer(options: NoOptions, context: ObserverContext) -> Observer:
        return SlowObserver(timer)

    catalogue = catalogue_with(
        PolicyDescriptor(name="slow", api_version=(1, 7), factory=make_policy),
        ObserverDescriptor(name="watcher", api_version=(1, 7), factory=make_observer),
    )
    return EngineHarness(["scheduler=slow", "observers=[watcher]", *overrides], catalogue=catalogue)


def plugins_of(engine: EngineHarness) -> PluginStats:
    plugins = engine.core.stats().plugins
    assert plugins is not None
    return plugins


def rows(plugins: PluginStats) -> dict[tuple[str, str, str], tuple[float, int]]:
    return {one[:3]: (round(one.seconds, 6), one.num_calls) for one in plugins.times}


def run_to_the_end(engine: EngineHarness, num_tokens: int) -> None:
    engine.add([1, 2, 3], max_tokens=num_tokens)
    while engine.core.has_requests():
        engine.step()


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_what_a_policy_overrides_and_each_observer_are_told_with_calls_and_seconds(timer: HandTimer, loop: str) -> None:
    engine = slow_engine(timer, f"engine={loop}")
    run_to_the_end(engine, 10)
    orders = rows(plugins_of(engine))[("policy", "slow", "waiting_order")]
    assert orders == (round(0.003 * orders[1], 6), orders[1])
    assert orders[1] >= 1
    assert rows(plugins_of(engine)) == {
        ("policy", "slow", "waiting_order"): orders,
        ("policy", "slow", "on_step"): (0.01, 10),
        ("observer", "watcher", "on_step"): (0.02, 10),
    }


def test_the_step_is_the_whole_of_which_plugins_are_a_part(timer: HandTimer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tokenyard.engine.loop.perf_counter", timer)
    engine = slow_engine(timer)
    run_to_the_end(engine, 40)
    plugins = plugins_of(engine)
    # Nothing but the plugins takes time here, so they are all of it.
    assert plugins.step_seconds == pytest.approx(sum(one.seconds for one in plugins.times))


def test_a_policy_that_overrides_nothing_has_no_timers() -> None:
    engine = EngineHarness(["scheduler=fcfs"])
    run_to_the_end(engine, 5)
    assert plugins_of(engine).times == ()


def test_what_may_be_called_for_each_request_is_timed_only_with_a_budget() -> None:
    plain, watched = EngineHarness(["scheduler=fcfs"]), EngineHarness(["scheduler=fcfs", "plugins.budget_us=1e9"])
    for engine in (plain, watched):
        run_to_the_end(engine, 40)
    assert "lookup" not in vars(plain.kv_cache_manager)
    kinds = {(one.kind, one.plugin) for one in plugins_of(watched).times}
    assert ("kv_cache", "paged") in kinds
    assert plugins_of(plain).num_over_budget == plugins_of(watched).num_over_budget == 0


class Asking(SchedulingPolicy):
    """Asks everything that a policy may ask."""

    def waiting_key(self, request: RequestView, view: SchedulerView) -> float:
        return view.predictor.output_len(request) + view.latency.predict(StepLoad(num_decodes=1))


def test_predictor_latency_model_and_eviction_rule_are_told_by_their_names() -> None:
    descriptor = PolicyDescriptor(name="asking", api_version=(1, 7), factory=lambda options, context: Asking())
    given = ["scheduler=asking", "scheduler.predictor=prompt", "latency=constant", "latency.per_step=1"]
    engine = EngineHarness([*given, "plugins.budget_us=1e9"], catalogue=catalogue_with(descriptor))
    run_to_the_end(engine, 40)
    found = rows(plugins_of(engine))
    assert found[("predictor", "prompt", "output_len")][1] == 1
    assert found[("latency", "constant", "step_seconds")][1] >= 1
    assert found[("policy", "asking", "waiting_key")][1] == 1
    assert found[("eviction", "lru", "pop")][1] >= 1


def test_a_shadow_is_told_apart_from_the_policy_that_acts(timer: HandTimer) -> None:
    engine = slow_engine(timer, "scheduler.shadow=priority")
    run_to_the_end(engine, 5)
    found = rows(plugins_of(engine))
    assert found[("shadow", "priority", "waiting_key")][1] == 1
    assert found[("policy", "slow", "on_step")][1] == 5


def test_without_stats_and_without_a_budget_nothing_is_timed(timer: HandTimer) -> None:
    engine = slow_engine(timer, "engine.log_stats=false")
    run_to_the_end(engine, 5)
    assert engine.core.stats().plugins is None
    budgeted = slow_engine(timer, "engine.log_stats=false", "plugins.budget_us=1e9")
    run_to_the_end(budgeted, 5)
    assert ("policy", "slow", "on_step") in rows(plugins_of(budgeted))


def test_stats_of_two_runs_are_equal_although_no_two_take_the_same_time() -> None:
    first, second = EngineHarness(["scheduler=priority"]), EngineHarness(["scheduler=priority"])
    for engine in (first, second):
        run_to_the_end(engine, 5)
    assert plugins_of(first).step_seconds != plugins_of(second).step_seconds
    assert first.core.stats() == second.core.stats()


def test_metrics_tell_each_point_of_each_plugin_by_labels(timer: HandTimer) -> None:
    engine = slow_engine(timer)
    run_to_the_end(engine, 10)
    found = {
        (one.name, one.labels.get("point")): one for one in metrics_of(engine.core.stats()) if "plugin" in one.name
    }
    seconds = found[("tokenyard:plugin_seconds", "on_step")]
    assert (seconds.kind, seconds.alias) == ("counter", seconds.name)
    assert found[("tokenyard:plugin_calls", "waiting_order")].labels == {
        "kind": "policy",
        "plugin": "slow",
        "point": "waiting_order",
    }
    assert found[("tokenyard:plugin_budget_exceeded", None)].value == 0


# ---- The budget -----------------------------------------------------------------------------------------------------


def budgeted(timer: HandTimer, clock: VirtualClock, budget_us: float) -> PluginTimes:
    return PluginTimes(clock, budget_us=budget_us, owner=lambda kind, plugin: f"{plugin}-package", now=timer)


def spend(times: PluginTimes, timer: HandTimer, **seconds: float) -> None:
    """A window of steps in which each point of the policy `p` takes so long a step."""
    for _ in range(WINDOW):
        for point, long in seconds.items():
            with times.timer("policy", "p", point):
                timer.seconds += long
        times.count_step(1.0)


def test_a_window_above_the_budget_is_told_with_its_costliest_point_and_who_it_came_with(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timer = HandTimer()
    times = budgeted(timer, VirtualClock(), 500)
    spend(times, timer, admit=0.0004, on_step=0.0002)
    (warning,) = caplog.messages
    assert warning == (
        "plugins took 600 us a step in the last 100 steps, and plugins.budget_us=500; the costliest is policy 'p' of "
        "p-package in admit, 400 us a step"
    )
    assert times.stats(is_exact=True).num_over_budget == 1


def test_a_mean_at_the_budget_is_within_it_and_one_costly_step_makes_no_window(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timer = HandTimer()
    times = budgeted(timer, VirtualClock(), 2**-10 * 1e6)
    spend(times, timer, admit=2**-10)
    with times.timer("policy", "p", "admit"):
        timer.seconds += 2**-10 * WINDOW / 2
    spend(times, timer, admit=2**-11)
    assert caplog.messages == []
    assert times.stats(is_exact=True).num_over_budget == 0


def test_each_window_is_counted_and_told_at_most_once_a_minute_of_the_engine_s_clock(
    caplog: pytest.LogCaptureFixture,
) -> None:
    timer, clock = HandTimer(), VirtualClock()
    times = budgeted(timer, clock, 100)
    told = []
    for number in range(5):
        spend(times, timer, admit=0.001)
        told.append(len(caplog.messages))
        assert times.stats(is_exact=True).num_over_budget == number + 1
        clock.wait(until=clock.now() + WARNING_INTERVAL / 2)
    assert told == [1, 1, 2, 2, 3]


def test_a_window_that_was_over_says_nothing_of_the_next(caplog: pytest.LogCaptureFixture) -> None:
    timer, clock = HandTimer(), VirtualClock()
    times = budgeted(timer, clock, 100)
    spend(times, timer, admit=0.001)
    clock.wait(until=10 * WARNING_INTERVAL)
    spend(times, timer, admit=0.00005)
    assert len(caplog.messages) == 1


def test_an_engine_with_a_slow_policy_warns_and_goes_on(timer: HandTimer, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "tokenyard"):
        engine = slow_engine(timer, "plugins.budget_us=2500")
        run_to_the_end(engine, WINDOW)
    (warning,) = [text for text in caplog.messages if "budget" in text]
    assert "observer 'watcher'" in warning
    assert "in on_step, 2000 us a step" in warning
    assert plugins_of(engine).num_over_budget == 1


@pytest.mark.parametrize("given", ["0", "-1", ".inf", ".nan", "many", "true"])
def test_a_budget_that_is_no_time_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match=r"plugins\.budget_us"):
        load_engine_config([f"plugins.budget_us={given}"])


# ---- Timers as attributes -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Frozen(LatencyModel):
    seconds: float

    def step_seconds(self, load: StepLoad) -> float:
        return self.seconds


def test_a_frozen_part_takes_timers_too_and_stays_what_it_is() -> None:
    times, part = PluginTimes(VirtualClock(), is_detailed=True), Frozen(2.0)
    assert times.watch(part, "latency", "frozen") is part
    assert part.step_seconds(StepLoad()) == 2.0
    assert part == Frozen(2.0)
    assert rows(times.stats(is_exact=True))[("latency", "frozen", "step_seconds")][1] == 1


def test_counts_lag_a_few_steps_unless_they_are_asked_to_be_exact() -> None:
    timer = HandTimer()
    times = PluginTimes(VirtualClock(), now=timer)
    with times.timer("policy", "p", "admit"):
        timer.seconds += 1
    times.count_step(1.0)
    assert times.stats() == PluginStats()
    assert times.stats(is_exact=True).times[0].seconds == 1
    assert times.stats() is times.stats()
