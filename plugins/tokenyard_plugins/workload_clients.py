"""`workload=clients`: several clients, each with its own rate, lengths and times."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tokenyard import ComponentDescriptor, hookimpl
from tokenyard.interfaces import Workload, WorkloadRequest

from tokenyard_plugins._generated.arrival_options import (
    ArrivalOptions,
    ProfileOptions,
    check_burstiness,
    check_count,
    check_deadline,
    check_rate,
    check_seconds,
)
from tokenyard_plugins._generated.length_options import LengthOptions, check_lengths

if TYPE_CHECKING:
    import numpy as np
    from tokenyard.interfaces import WorkloadContext

_MOST_CLIENTS = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientOptions:
    """One of `workload.members`: a client, or what it does for a while when another one has the same name.

    Give its `rate`, or its `weight`: its share of `workload.rate`.
    """

    name: str
    rate: float | None = None  # requests per second
    weight: float | None = None  # its share of workload.rate, relative to the other clients with a weight
    burstiness: float = 1.0  # 1 = a Poisson process; less = burstier, more = more even, inf = at equal intervals
    profile: ProfileOptions | None = None  # how its rate changes, counted from its start; None = it does not
    prompt: int | LengthOptions = 256  # tokens
    output: int | LengthOptions = 256  # tokens
    start: float = 0.0  # seconds
    stop: float | None = None  # seconds, no request from then on; None = it goes on
    num_requests: int | None = None  # at most; None = any number
    priority: int = 0  # lower = more urgent
    deadline: float | None = None  # seconds after its arrival at which a request is aborted; None = never

    def __post_init__(self) -> None:
        if not self.name:
            raise ValueError("name is empty")
        if (self.rate is None) == (self.weight is None):
            raise ValueError(f"client '{self.name}' needs either a rate or a weight")
        if self.rate is not None:
            check_rate("rate", self.rate)
        if self.weight is not None and not 1e-9 <= self.weight <= 1e9:
            raise ValueError(f"weight={self.weight} is not valid: it must be a number above 0, from 1e-9 to 1e9")
        check_burstiness(self.burstiness)
        check_lengths(prompt=self.prompt, output=self.output)
        check_seconds("start", self.start, may_be_zero=True)
        if self.stop is not None and not self.start < self.stop < float("inf"):
            raise ValueError(f"stop={self.stop} is not valid: it must be seconds, after start={self.start}")
        if self.num_requests is not None:
            check_count("num_requests", self.num_requests)
        check_deadline(self.deadline)

    def arrivals(self) -> ArrivalOptions:
        """When its requests come, its start being 0; it must have a rate."""
        return ArrivalOptions(
            rate=self.rate or 0.0, burstiness=self.burstiness, profile=self.profile or ProfileOptions()
        )


_TWO_CLIENTS = (ClientOptions(name="a", rate=1.5), ClientOptions(name="b", rate=3.0))  # 90 and 180 a minute


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientsOptions:
    """Options of `workload=clients`."""

    members: tuple[ClientOptions, ...] = _TWO_CLIENTS
    rate: float | None = None  # requests per second of all clients that have a weight instead of a rate of their own
    num_requests: int | None = 1000  # of all clients together; None = until each has stopped
    stop: float | None = None  # seconds, no request from then on; None = it goes on

    def __post_init__(self) -> None:
        check_count("the number of members", len(self.members), _MOST_CLIENTS)
        if self.num_requests is not None:
            check_count("num_requests", self.num_requests)
        if self.stop is not None:
            check_seconds("stop", self.stop)
        self._check_end()
        self._check_rate()

    def _check_end(self) -> None:
        if self.num_requests is None and self.stop is None:
            endless = [member.name for member in self.members if member.stop is None and member.num_requests is None]
            if endless:
                raise ValueError(f"client '{endless[0]}' never ends; give it stop or num_requests, or all of them one")

    def _check_rate(self) -> None:
        weighted = [member.name for member in self.members if member.weight is not None]
        if weighted and self.rate is None:
            raise ValueError(f"client '{weighted[0]}' has a share of the rate, which is not given; set workload.rate")
        if self.rate is not None:
            check_rate("rate", self.rate)
            if not weighted:
                raise ValueError(f"rate={self.rate} is nobody's: no client has a weight; give them weights, no rates")
        self.with_rates()  # none of them too small

    def with_rates(self) -> Sequence[ClientOptions]:
        """The members, each with the rate that its weight means."""
        total = sum(member.weight or 0.0 for member in self.members)
        return [
            member
            if member.weight is None
            else replace(member, rate=(self.rate or 0.0) * member.weight / total, weight=None)
            for member in self.members
        ]


class ClientsWorkload(Workload):
    """A client's requests depend on the seed, its name and its own options: one more client changes none of them."""

    def __init__(self, options: ClientsOptions, context: WorkloadContext) -> None:
        self._options, self._seed = options, context.seed

    @property
    def description(self) -> str:
        members = self._options.with_rates()
        rates = ", ".join(f"{member.name} {member.rate or 0:.3g}" for member in members[:8])
        more = f" and {len(members) - 8} more" if len(members) > 8 else ""
        return f"generated requests of {len(members)} clients, per second: {rates}{more}; seed {self._seed}"

    def requests(self) -> Iterator[WorkloadRequest]:
        seen: Counter[str] = Counter()
        streams: list[Iterator[tuple[float, int, WorkloadRequest]]] = []
        for number, member in enumerate(self._options.with_rates()):
            streams.append(_numbered(number, self._requests_of(member, seen[member.name])))
            seen[member.name] += 1
        merged = heapq.merge(*streams)
        return (request for _, _, request in itertools.islice(merged, self._options.num_requests))

    def _requests_of(self, member: ClientOptions, occurrence: int) -> Iterator[WorkloadRequest]:
        """`occurrence` counts the members of its name before it."""
        from tokenyard_plugins._generated.arrival_times import arrival_times  # numpy only when chosen
        from tokenyard_plugins._generated.draws import generator
        from tokenyard_plugins._generated.lengths import length_stream

        def rng(quantity: str) -> np.random.Generator:
            return generator(self._seed, member.name, occurrence, quantity)

        stop = min(member.stop or math.inf, self._options.stop or math.inf)
        rows = zip(
            arrival_times(member.arrivals(), rng("arrivals"), member.start),
            length_stream(member.prompt, rng("prompt")),
            length_stream(member.output, rng("output")),
            strict=False,  # none of them ends
        )
        for arrival, prompt, output in itertools.islice(rows, member.num_requests):
            if arrival >= stop:
                return
            yield WorkloadRequest(
                arrival=arrival,
                num_prompt_tokens=prompt,
                num_output_tokens=output,
                client=member.name,
                priority=member.priority,
                deadline=member.deadline,
            )


def _numbered(number: int, requests: Iterator[WorkloadRequest]) -> Iterator[tuple[float, int, WorkloadRequest]]:
    """As they are merged: of those that arrive together, the first member's come first."""
    return ((request.arrival, number, request) for request in requests)


@hookimpl
def tokenyard_components() -> Iterator[ComponentDescriptor[ClientsOptions]]:
    yield ComponentDescriptor(
        component_kind="workload",
        name="clients",
        api_version=(1, 7),
        summary="several clients, each with its own rate, lengths and times",
        options_type=ClientsOptions,
        factory=ClientsWorkload,
    )
