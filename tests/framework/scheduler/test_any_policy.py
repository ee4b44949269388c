"""Whatever a policy decides, as long as it is legal: every request ends once, with its tokens, and nothing is left."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenyard import EngineConfig, PolicyDescriptor
from tokenyard.config import PolicyConfig
from tokenyard.interfaces import AdmitDecision, PreemptMode, SchedulingPolicy
from tokenyard.testing import EngineHarness, catalogue_with
from tokenyard.testing.contracts.base import AMPLE, Shape
from tokenyard.testing.contracts.traces import Operation, Player, arrivals, play, shapes, traces

if TYPE_CHECKING:
    from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """How often it interferes."""

    share: float = 0.5


class Chaos(SchedulingPolicy):
    """Answers at random, within what is allowed, and names no time to be asked again.

    After a while it lets things be: what it displaces again and again would not end in the time of a test.
    """

    may_starve = True
    waiting_window = 3

    def __init__(self, share: float) -> None:
        self.share = share
        self.patience = 300  # questions

    def _now_and_then(self, view: SchedulerView) -> bool:
        self.patience -= 1
        return self.patience > 0 and view.rng.random() < self.share

    def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
        # To defer all for good is an error of the policy's, so it lets others by only while somebody runs.
        defers = view.num_running and self._now_and_then(view)
        return AdmitDecision.defer("not now") if defers else AdmitDecision.accept()

    def waiting_key(self, request: RequestView, view: SchedulerView) -> object:
        return view.rng.randint(0, 3)

    def _some(self, requests: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        if not self._now_and_then(view):
            return requests
        return view.rng.sample(list(requests), view.rng.randint(0, len(requests)))

    def waiting_order(self, window: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return self._some(window, view)

    def running_order(self, running: Sequence[RequestView], view: SchedulerView) -> Sequence[RequestView]:
        return self._some(running, view)

    def token_budget(self, view: SchedulerView) -> int | None:
        return view.rng.randint(0, 8) if self._now_and_then(view) else None

    def prefill_budget(self, view: SchedulerView) -> int | None:
        return view.rng.randint(0, 8) if self._now_and_then(view) else None

    def chunk_size(self, request: RequestView, num_left: int, view: SchedulerView) -> int:
        return view.rng.randint(0, num_left) if self._now_and_then(view) else num_left

    def victim(self, candidates: Sequence[RequestView], num_blocks_needed: int, view: SchedulerView) -> RequestView:
        return view.rng.choice(list(candidates))

    def preempt_mode(self, request: RequestView, view: SchedulerView) -> PreemptMode | None:
        return view.rng.choice([None, *PreemptMode])

    def requeue_key(self, request: RequestView, view: SchedulerView) -> object | None:
        return view.rng.choice([None, 0, 5])

    def max_running(self, view: SchedulerView) -> int | None:
        return view.rng.randint(0, 4) if self._now_and_then(view) else None


def _make(options: ChaosOptions, context: PolicyContext) -> SchedulingPolicy:
    return Chaos(options.share)


CATALOGUE = catalogue_with(PolicyDescriptor(name="chaos", api_version=(1, 7), options_type=ChaosOptions, factory=_make))
MODES = ("recompute", "swap", "pause")


@lru_cache
def configured(*overrides: str) -> EngineConfig:
    """Composing takes longer than a trace does."""
    return EngineHarness(overrides, catalogue=CATALOGUE).config


def chaotic(shape: Shape, loop: str, mode: str, share: float, seed: int) -> EngineHarness:
    config = configured("scheduler=chaos", loop, f"scheduler.preempt_mode={mode}")
    scheduler = replace(config.scheduler, policy=PolicyConfig(name="chaos", options=ChaosOptions(share=share)))
    config = shape.applied(replace(config, seed=seed, scheduler=scheduler))
    return EngineHarness(config=config, catalogue=CATALOGUE)


@pytest.fixture(params=["sync", "overlap"])
def loop(request: pytest.FixtureRequest) -> str:
    return f"engine={request.param}"


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(trace=arrivals(), shape=shapes(), share=st.sampled_from([0.1, 0.5, 0.9, 1.0]), seed=st.integers(0, 99))
def test_tokens_do_not_depend_on_what_a_policy_decides(
    loop: str, mode: str, trace: Sequence[Operation], shape: Shape, share: float, seed: int
) -> None:
    ample = EngineHarness(config=AMPLE.applied(configured(loop)))
    assert play(chaotic(shape, loop, mode, share, seed), trace) == play(ample, trace)


@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(trace=traces(), shape=shapes(), share=st.sampled_from([0.1, 0.5, 0.9, 1.0]), seed=st.integers(0, 99))
def test_every_request_ends_once_and_nothing_is_left_whatever_happens_between(
    loop: str, mode: str, trace: Sequence[Operation], shape: Shape, share: float, seed: int
) -> None:
    player = Player(chaotic(shape, loop, mode, share, seed), asks_logprobs=True)
    player.play(trace)
    player.finish()
