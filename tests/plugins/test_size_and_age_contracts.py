"""The suite for policies, on those that order by size, age and attained service."""

from __future__ import annotations

from tokenyard.testing import PolicyContract


class Quick(PolicyContract):
    max_examples = 4


class TestSJF(Quick):
    overrides = ("scheduler=sjf",)


class TestSJFWithEverything(Quick):
    overrides = (
        "scheduler=sjf",
        "scheduler.predictor=prompt",
        "scheduler.policy.residual=true",
        "scheduler.policy.ageing_seconds=2",
    )


class TestSRPT(Quick):
    overrides = ("scheduler=srpt",)


class TestSRPTWithAgeing(Quick):
    overrides = (
        "scheduler=srpt",
        "scheduler.predictor={name: prompt, learning_rate: 0.5}",
        "scheduler.policy.ageing_seconds=2",
    )


class TestMLFQ(Quick):
    overrides = ("scheduler=mlfq", "scheduler.policy.quantum=4")


class TestLAS(Quick):
    overrides = ("scheduler=las", "scheduler.policy.quantum=4")


class TestPLAS(Quick):
    overrides = ("scheduler=plas", "scheduler.policy.quantum=4")


class TestHRRN(Quick):
    overrides = ("scheduler=hrrn", "scheduler.policy.window=3")


class TestRandom(Quick):
    overrides = ("scheduler=random",)


class TestLongestFirst(Quick):
    overrides = ("scheduler=longest-first",)


class TestPriorityThatDisplaces(Quick):
    overrides = ("scheduler=priority", "scheduler.policy.preempt=true")


class TestPriorityThatDisplacesAndAges(Quick):
    overrides = (
        "scheduler=priority",
        "scheduler.policy.preempt=true",
        "scheduler.policy.ageing_seconds=60",
    )
