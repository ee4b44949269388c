"""The policy by its numbers, in a real engine without a model, and under the suite that every policy must pass."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

import pytest
from tokenyard import PolicyDescriptor
from tokenyard.errors import ConfigError, ValidationError
from tokenyard.interfaces import PolicyContext, RequestView, SchedulerView
from tokenyard.scheduling_hints import read_hints
from tokenyard.testing import PolicyContract, catalogue_with
from tokenyard.testing.pytest_plugin import MakeHarness
from tokenyard_wspt import Worth, WSPTOptions, WSPTPolicy, make_policy, tokenyard_policies


def key(policy: WSPTPolicy, prompt: int, output: int, *, weight: float = 1.0, arrival: float = 0.0) -> float:
    request = SimpleNamespace(num_prompt_tokens=prompt, arrival_time=arrival, metadata={"weight": weight})
    view = SimpleNamespace(predictor=SimpleNamespace(output_len=lambda request: output))
    return policy.waiting_key(cast("RequestView", request), cast("SchedulerView", view))


def test_less_work_goes_first() -> None:
    policy = WSPTPolicy(WSPTOptions())
    assert key(policy, 10, 5) < key(policy, 10, 6) < key(policy, 100, 1)


def test_twice_the_weight_may_have_twice_the_work() -> None:
    policy = WSPTPolicy(WSPTOptions())
    assert key(policy, 20, 9, weight=2) < key(policy, 10, 5) < key(policy, 20, 11, weight=2)


def test_with_ageing_an_old_long_request_overtakes_a_young_short_one() -> None:
    policy = WSPTPolicy(WSPTOptions(ageing=10.0))
    assert key(policy, 100, 0, arrival=0.0) < key(policy, 1, 0, arrival=10.0)


def test_an_ageing_that_is_none_is_refused() -> None:
    context = PolicyContext(seed=0, max_num_seqs=1, max_num_batched_tokens=1)
    with pytest.raises(ConfigError, match=r"scheduler\.policy\.ageing=-1\.0 is not valid"):
        make_policy(WSPTOptions(ageing=-1.0), context)


@pytest.mark.parametrize("weight", [0, -1, "much"])
def test_a_weight_that_is_none_is_refused_before_the_request_is_queued(weight: object) -> None:
    with pytest.raises(ValidationError, match="weight"):
        read_hints({"weight": weight}, Worth)


def test_in_an_engine_the_request_with_the_least_work_for_its_weight_runs_next(engine_harness: MakeHarness) -> None:
    # With the package installed, the name would be enough; so the tests run from a checkout too.
    catalogue = catalogue_with(*tokenyard_policies())
    harness = engine_harness(["scheduler=wspt", "scheduler.max_num_seqs=1"], catalogue=catalogue)
    long = harness.add(range(300), max_tokens=8)
    short = harness.add(range(20), max_tokens=8)
    worthy = harness.add(range(300), max_tokens=8, metadata={"weight": 100})
    harness.step()
    assert harness.running == [worthy]
    assert harness.waiting == [short, long]


class TestWSPT(PolicyContract):
    overrides: Sequence[str] = ("scheduler=wspt",)

    def descriptors(self) -> Sequence[PolicyDescriptor[WSPTOptions]]:
        return list(tokenyard_policies())


class TestWSPTWithAgeing(TestWSPT):
    overrides = ("scheduler=wspt", "scheduler.policy.ageing=50")
