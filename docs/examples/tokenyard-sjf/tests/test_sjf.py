"""The policy by its numbers, in a real engine without a model, and under the suite that every policy must pass."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import cast

from tokenyard import PolicyDescriptor
from tokenyard.interfaces import RequestView, SchedulerView
from tokenyard.testing import PolicyContract, catalogue_with
from tokenyard.testing.pytest_plugin import MakeHarness
from tokenyard_sjf import SJFOptions, SJFPolicy, tokenyard_policies


def key(policy: SJFPolicy, prompt: int, output: int, arrival: float = 0.0) -> float:
    request = SimpleNamespace(num_prompt_tokens=prompt, max_output_tokens=output, arrival_time=arrival)
    return policy.waiting_key(cast("RequestView", request), cast("SchedulerView", None))


def test_less_work_goes_first() -> None:
    policy = SJFPolicy(SJFOptions())
    assert key(policy, 10, 5) < key(policy, 10, 6) < key(policy, 100, 1)


def test_the_outputs_weight_is_an_option() -> None:
    policy = SJFPolicy(SJFOptions(output_weight=0.0))
    assert key(policy, 10, 500) < key(policy, 11, 1)


def test_with_ageing_an_old_long_request_overtakes_a_young_short_one() -> None:
    policy = SJFPolicy(SJFOptions(ageing=10.0))
    assert key(policy, 100, 0, arrival=0.0) < key(policy, 1, 0, arrival=10.0)


def test_in_an_engine_the_shortest_request_runs_next(engine_harness: MakeHarness) -> None:
    # With the package installed, the name would be enough; so the tests run from a checkout too.
    catalogue = catalogue_with(*tokenyard_policies())
    harness = engine_harness(["scheduler=sjf", "scheduler.max_num_seqs=1"], catalogue=catalogue)
    long, short = harness.add(range(300)), harness.add(range(20))
    harness.step()
    assert harness.running == [short]
    assert harness.waiting == [long]


class TestSJF(PolicyContract):
    overrides: Sequence[str] = ("scheduler=sjf",)

    def descriptors(self) -> Sequence[PolicyDescriptor[SJFOptions]]:
        return list(tokenyard_policies())


class TestSJFWithAgeing(TestSJF):
    overrides = ("scheduler=sjf", "scheduler.policy.ageing=5")
