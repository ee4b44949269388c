"""The policy alone: no model, no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from tokenyard.interfaces import RequestView, SchedulerView
from tokenyard_sjf import SJFOptions, SJFPolicy


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
