"""The generated workloads keep the contract of workloads."""

from __future__ import annotations

from tokenyard.testing import WorkloadContract


class TestSynthetic(WorkloadContract):
    overrides = ("workload=synthetic", "workload.priorities=[1,2]", "workload.deadline=60")
    long = ("workload.num_requests=20000", "workload.prompt={kind: lognormal, mean: 500, cv: 1.5}")


class TestSyntheticInBursts(WorkloadContract):
    overrides = (
        "workload=synthetic",
        "workload.burstiness=0.05",
        "workload.profile={kind: on_off, on_time: 5, off_time: 3}",
        "workload.prompt={kind: empirical, histogram: azure_conv_prompt, max: 2000}",
        "workload.output={kind: geometric, mean: 30}",
    )
    long = ("workload.num_requests=20000",)


class TestSharedPrefix(WorkloadContract):
    overrides = ("workload=shared_prefix", "workload.suffix={kind: uniform, min: 1, max: 50}")
    long = ("workload.num_groups=20", "workload.group_size=1000")


class TestMultiTurn(WorkloadContract):
    overrides = (
        "workload=multi_turn",
        "workload.turns={kind: geometric, mean: 3}",
        "workload.prompt={kind: uniform, min: 1, max: 50}",
        "workload.system_prompt=40",
    )
    long = ("workload.num_sessions=20000",)


class TestMultiTurnInARow(WorkloadContract):
    """Turns and times that are all alike: only the first arrivals are drawn."""

    overrides = ("workload=multi_turn", "workload.think_time=0", "workload.max_prompt=600")


class TestClientsWhoChangePlaces(WorkloadContract):
    overrides = ("workload=clients_shift",)


class TestClientsByWeight(WorkloadContract):
    overrides = (
        "workload=clients",
        "workload.rate=10",
        "workload.members=[{name: a, weight: 1, deadline: 60}, {name: b, weight: 3, start: 5, priority: 1}]",
    )
    long = ("workload.num_requests=20000",)
