"""A shadow policy is asked, counted, and never obeyed."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard.catalogue import Catalogue
from tokenyard.config import EngineConfig
from tokenyard.descriptors import PolicyDescriptor
from tokenyard.engine_outputs import ShadowStats
from tokenyard.errors import PluginError
from tokenyard.interfaces.policy import (
    AdmitDecision,
    PreemptMode,
    RequestView,
    SchedulerView,
    SchedulingPolicy,
    StepOutcome,
)
from tokenyard.launch.compose import load_engine_config
from tokenyard.metrics import metrics_of
from tokenyard.plugins import load_catalogue
from tokenyard.testing import EngineHarness
from tokenyard.testing.parts import catalogue_with
from traced_runs import base_config, drive, harness, sizes, with_sizes

POLICIES = load_catalogue().names("policy")


class Contrary(SchedulingPolicy):
    """Decides everything otherwise, at random, and remembers what it was told."""

    waiting_window = 4

    def __init__(self) -> None:
        self.num_events = 0

    def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
        return AdmitDecision.defer("no") if view.rng.random() < 0.5 else AdmitDecision.reject("never")

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return view.rng.random()

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        cast("list[RequestView]", window).reverse()  # a list of its own, so it may
        return window

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        cast("list[RequestView]", running).reverse()
        return running[:1]

    def token_budget(self, view: SchedulerView) -> int | None:
        return 1

    def prefill_budget(self, view: SchedulerView) -> int | None:
        return 0

    def chunk_size(self, request: RequestView, num_left: int, view: SchedulerView) -> int:
        return 0

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        return view.rng.choice(candidates)

    def preempt_mode(self, request: RequestView, view: SchedulerView) -> PreemptMode | None:
        return PreemptMode.PAUSE

    def requeue_key(self, request: RequestView, view: SchedulerView) -> object | None:
        return view.rng.random()

    def max_running(self, view: SchedulerView) -> int | None:
        return 0

    def wake_at(self, view: SchedulerView) -> float | None:
        return view.now + 1

    def on_step(self, outcomes: Sequence[StepOutcome], view: SchedulerView) -> None:
        self.num_events += len(outcomes)


class Drawing(SchedulingPolicy):
    """Orders at random."""

    may_starve = True

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return view.rng.random()

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        return view.rng.choice(candidates)


class Failing(SchedulingPolicy):
    """Fails when the second request comes."""

    def __init__(self) -> None:
        self._count = 0

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        self._count += 1
        return () if self._count < 2 else [][1]


def parts(*policies: type[SchedulingPolicy]) -> Catalogue:
    return catalogue_with(
        *(
            PolicyDescriptor(
                name=policy.__name__.lower(),
                api_version=(1, 7),
                summary="",
                factory=lambda options, context, policy=policy: policy(),
            )
            for policy in policies
        )
    )


CATALOGUE = parts(Contrary, Drawing, Failing)


def config_of(*overrides: str) -> EngineConfig:
    return load_engine_config(["model.max_model_len=40", *overrides], catalogue=CATALOGUE)[0]


def run(config: EngineConfig, seed: int) -> tuple[list[dict[str, int]], ShadowStats | None]:
    with harness(config, catalogue=CATALOGUE) as engine:
        return drive(engine, seed), engine.stats.shadow


@pytest.mark.parametrize("acting", ["fcfs", "drawing"])
@settings(max_examples=12, deadline=None)
@given(loop=st.sampled_from(["sync", "overlap"]), limits=sizes(), seed=st.integers(0, 1000))
def test_the_schedule_is_the_same_with_and_without_it(
    acting: str, loop: str, limits: Mapping[str, Mapping[str, object]], seed: int
) -> None:
    alone = _config(acting, loop, None)
    watched = _config(acting, loop, "contrary")
    with_it, shadow = run(with_sizes(watched, limits), seed)
    assert run(with_sizes(alone, limits), seed)[0] == with_it
    assert shadow is not None
    assert shadow.is_on


_CONFIGS: dict[tuple[str, str, str | None], EngineConfig] = {}


def _config(acting: str, loop: str, shadow: str | None) -> EngineConfig:
    key = (acting, loop, shadow)
    if key not in _CONFIGS:
        chosen = [] if shadow is None else [f"scheduler.shadow={shadow}"]
        _CONFIGS[key] = config_of(f"scheduler={acting}", f"engine={loop}", *chosen)
    return _CONFIGS[key]


@pytest.mark.parametrize("policy", POLICIES)
def test_every_installed_policy_can_be_one(policy: str) -> None:
    limits: Mapping[str, Mapping[str, object]] = {
        "scheduler": {"max_num_seqs": 3, "max_num_batched_tokens": 12},
        "kv_cache": {"num_blocks": 12, "block_size": 4},
    }
    with harness(with_sizes(base_config(), limits)) as engine:
        alone = drive(engine, seed=5)
    with harness(with_sizes(base_config(f"scheduler.shadow={policy}"), limits)) as engine:
        assert drive(engine, seed=5) == alone
        shadow = engine.stats.shadow
    assert shadow is not None
    assert (shadow.policy, shadow.is_on) == (policy, True)


def test_one_that_is_the_acting_policy_agrees() -> None:
    config = config_of(
        "scheduler=priority", "scheduler.shadow=priority", "kv_cache.num_blocks=10", "kv_cache.block_size=4"
    )
    _, shadow = run(config, seed=2)
    assert shadow is not None
    assert shadow.points
    assert not any(point.num_otherwise for point in shadow.points)


def test_each_point_is_counted_where_it_is_asked() -> None:
    config = config_of("scheduler.shadow=contrary", "kv_cache.num_blocks=10", "kv_cache.block_size=4")
    _, shadow = run(config, seed=2)
    assert shadow is not None
    otherwise = {point.point for point in shadow.points if point.num_otherwise}
    expected = {"admit", "waiting_order", "running_order", "token_budget", "prefill_budget", "chunk_size", "victim"}
    assert expected | {"max_running", "preempt_mode", "requeue_key"} <= otherwise


def test_an_urgent_request_that_would_have_been_first_is_counted_once() -> None:
    with EngineHarness(["scheduler.shadow=priority", "scheduler.max_num_seqs=1"]) as engine:
        engine.add([1], "calm", 0, max_tokens=2)
        engine.add([1], "urgent", -1, max_tokens=2)
        engine.run()
        shadow = engine.stats.shadow
        decisions = engine.scheduler.take_shadow_decisions()
    assert shadow is not None
    assert {point.point: point[1:] for point in shadow.points}["waiting_order"] == (1, 1)
    assert ("waiting_order", "calm", "urgent") in [(one.point, one.actual, one.shadow) for one in decisions]


@pytest.mark.parametrize("names", [("a-calm", "b-urgent"), ("a-urgent", "b-calm")])
def test_one_that_displaces_looks_at_its_own_line(names: Sequence[str]) -> None:
    shadow = "scheduler.shadow={name: priority, preempt: true}"
    with EngineHarness([shadow, "scheduler.max_num_seqs=1", "engine=sync"]) as engine:
        engine.add([1, 2], "runs", 5, max_tokens=6, ignore_eos=True)
        engine.step()
        for name in names:
            engine.add([1, 2], name, 0 if "urgent" in name else 9, max_tokens=2, ignore_eos=True)
        for _ in range(4):
            engine.step()
        stats = engine.stats.shadow
    assert stats is not None
    # Whoever is first in the line of fcfs: the shadow would have let the urgent one run in each step.
    assert {point.point: point[1:] for point in stats.points}["running_order"] == (0, 4)


def test_while_nobody_may_start_one_that_displaces_looks_at_those_that_ran() -> None:
    shadow = "scheduler.shadow={name: priority, preempt: true}"
    with EngineHarness([shadow, "scheduler.max_num_seqs=1", "engine=sync"]) as engine:
        engine.add([1, 2], "runs", 5, max_tokens=6, ignore_eos=True)
        engine.step()
        engine.pause("wait")
        engine.add([1, 2], "urgent", 0, max_tokens=2)
        for _ in range(3):
            engine.step()
        stats = engine.stats.shadow
        engine.resume()
        engine.run()
    assert stats is not None
    assert {point.point: point[1:] for point in stats.points}["running_order"] == (3, 0)


def test_one_that_fails_is_switched_off_with_one_warning(caplog: pytest.LogCaptureFixture) -> None:
    _, shadow = run(config_of("scheduler.shadow=failing"), seed=1)
    assert shadow is not None
    assert not shadow.is_on
    warnings = [record.message for record in caplog.records if "shadow policy" in record.message]
    assert len(warnings) == 1
    assert "policy failing failed in waiting_key: IndexError" in warnings[0]


def test_one_that_is_not_installed_is_an_error_at_launch() -> None:
    with pytest.raises(PluginError, match="unknown policy 'nobody'"):
        config_of("scheduler.shadow=nobody")


def test_what_it_says_is_told_in_metrics_and_at_shutdown(caplog: pytest.LogCaptureFixture) -> None:
    with EngineHarness(["scheduler.shadow=priority", "scheduler.max_num_seqs=1"]) as engine:
        engine.add([1], "calm", 0, max_tokens=2)
        engine.add([1], "urgent", -1, max_tokens=2)
        engine.run()
        metrics = {
            (metric.labels["point"], metric.labels["agrees"]): metric.value
            for metric in metrics_of(engine.stats)
            if metric.name == "tokenyard:shadow_decisions"
        }
        caplog.set_level(logging.INFO, "tokenyard")
    assert metrics["waiting_order", "false"] == 1
    assert "shadow policy 'priority' would have decided otherwise: waiting_order 1 of 2 times" in caplog.text
