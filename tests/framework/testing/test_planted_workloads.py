"""The suite for workloads finds one planted fault each."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tokenyard.descriptors import ComponentDescriptor, Descriptor
from tokenyard.errors import ConfigError
from tokenyard.interfaces import Segment, Workload, WorkloadContext, WorkloadRequest
from tokenyard.testing import ContractViolation, WorkloadContract

NUM_REQUESTS = 30


class Right(Workload):
    """Half of its requests have one follow-up each."""

    count = NUM_REQUESTS
    has_content = True

    def __init__(self, context: WorkloadContext) -> None:
        self.seed = context.seed

    def requests(self) -> Iterator[WorkloadRequest]:
        draws, arrival = random.Random(self.seed), 0.0
        for number in range(self.count):
            arrival += draws.random()
            yield self.changed(number, request(arrival, number, 1 + draws.randrange(20)))

    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        return one

    def follow_ups(self, request: WorkloadRequest, end: float) -> Sequence[WorkloadRequest]:
        if request.priority or request.num_prompt_tokens % 2:
            return ()
        return (replace(request, arrival=end + 1.0, priority=1),)


def request(arrival: float, number: int, length: int) -> WorkloadRequest:
    content = (Segment(number, length),)
    return WorkloadRequest(
        arrival=arrival, num_prompt_tokens=length, num_output_tokens=3, client="a", content=content, deadline=60.0
    )


class Unsorted(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        return replace(one, arrival=10.0) if number == 0 else one


class NeverArrives(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        return replace(one, arrival=math.inf) if number == NUM_REQUESTS - 1 else one


class Negative(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        return replace(one, arrival=-1.0) if number == 0 else one


class NoOutput(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        return replace(one, num_output_tokens=0) if number == 7 else one


class LengthOfNumpy(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        return replace(one, num_prompt_tokens=np.int64(one.num_prompt_tokens))


class FollowUpWithoutPrompt(Right):
    def follow_ups(self, request: WorkloadRequest, end: float) -> Sequence[WorkloadRequest]:
        return [replace(one, num_prompt_tokens=0) for one in super().follow_ups(request, end)]


class ContentTooShort(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        return replace(one, num_prompt_tokens=one.num_prompt_tokens + 1)


class EmptySegment(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        return replace(one, content=(*(one.content or ()), Segment(5, 0)))


class UnknownContent(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        return replace(one, content=(Segment(-2, one.num_prompt_tokens),))


class HiddenContent(Right):
    has_content = False


class NamelessClient(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        return replace(one, client="")


class NoTime(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        return replace(one, deadline=0.0)


class EverySecond(Right):
    """Its kind counts its objects, as global state does."""

    number = 0

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        EverySecond.number += 1
        self.seed = context.seed + EverySecond.number % 2


class FollowsWhatWasTaken(Right):
    """Follow-ups depend on how many requests were taken before, so on who asks when."""

    num_taken = 0

    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        self.num_taken = number
        return one

    def follow_ups(self, request: WorkloadRequest, end: float) -> Sequence[WorkloadRequest]:
        later = super().follow_ups(request, end)
        return [replace(one, num_output_tokens=1 + self.num_taken) for one in later]


class NeverDraws(Right):
    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(replace(context, seed=0))


class FollowUpBefore(Right):
    def follow_ups(self, request: WorkloadRequest, end: float) -> Sequence[WorkloadRequest]:
        return [replace(one, arrival=end - 0.5) for one in super().follow_ups(request, end)]


class GoesOn(Right):
    def requests(self) -> Iterator[WorkloadRequest]:
        return (request(float(number), number, 1 + self.seed % 5) for number in itertools.count())


class Echoes(Right):
    def follow_ups(self, request: WorkloadRequest, end: float) -> Sequence[WorkloadRequest]:
        return (replace(request, arrival=end + 1.0),)


class Keeps(Right):
    count = 25_000

    def __init__(self, context: WorkloadContext) -> None:
        super().__init__(context)
        self.kept: list[WorkloadRequest] = []

    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        self.kept.append(one)
        return one


class MadeBefore(Right):
    count = 25_000

    def requests(self) -> Iterator[WorkloadRequest]:
        return iter(list(super().requests()))


class ReadsTheClock(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        time.monotonic()
        return one


class Shares(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        random.random()
        return one


class SharesNumpys(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        np.random.random()
        return one


class Talks(Right):
    @property
    def description(self) -> str:
        return "two\nlines"


class Raises(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        if number == 20:
            raise RuntimeError("planted")
        return one


class TooLong(Right):
    def changed(self, number: int, one: WorkloadRequest) -> WorkloadRequest:
        return replace(one, num_prompt_tokens=2**30, content=None)


class Empty(Right):
    count = 0


class Planted:
    """What the descriptor makes. There is one for all faults: composing a config for each takes a while."""

    make: type[Right] = Right


WORKLOAD: ComponentDescriptor[Any] = ComponentDescriptor(
    component_kind="workload",
    name="planted",
    api_version=(1, 7),
    factory=lambda options, context: Planted.make(context),
)


class Suite(WorkloadContract):
    most_requests = 5000

    def descriptors(self) -> Sequence[Descriptor[Any]]:
        return [WORKLOAD]


@pytest.mark.parametrize(
    ("make", "test", "rule"),
    [
        (Unsorted, "test_requests_come_in_order_of_arrival", "workload.arrivals_sorted"),
        (NeverArrives, "test_requests_come_in_order_of_arrival", "workload.arrivals_sorted"),
        (Negative, "test_requests_come_in_order_of_arrival", "workload.arrivals_sorted"),
        (Raises, "test_requests_come_in_order_of_arrival", "workload.never_raises"),
        (NoOutput, "test_every_request_has_a_prompt_and_an_output", "workload.lengths_positive"),
        (LengthOfNumpy, "test_every_request_has_a_prompt_and_an_output", "workload.lengths_positive"),
        (FollowUpWithoutPrompt, "test_every_request_has_a_prompt_and_an_output", "workload.lengths_positive"),
        (ContentTooShort, "test_contents_add_up_to_the_prompts", "workload.content_adds_up"),
        (EmptySegment, "test_contents_add_up_to_the_prompts", "workload.content_adds_up"),
        (UnknownContent, "test_contents_add_up_to_the_prompts", "workload.content_adds_up"),
        (HiddenContent, "test_contents_add_up_to_the_prompts", "workload.content_adds_up"),
        (NamelessClient, "test_hints_are_valid", "workload.hints"),
        (NoTime, "test_hints_are_valid", "workload.hints"),
        (EverySecond, "test_the_same_seed_gives_the_same_requests", "workload.same_seed_same_requests"),
        (FollowsWhatWasTaken, "test_the_same_seed_gives_the_same_requests", "workload.same_seed_same_requests"),
        (NeverDraws, "test_another_seed_gives_other_requests", "workload.other_seed_other_requests"),
        (FollowUpBefore, "test_follow_ups_come_after_the_end_that_they_follow", "workload.follow_ups_not_before"),
        (GoesOn, "test_it_ends", "workload.finite"),
        (Echoes, "test_it_ends", "workload.finite"),
        (Keeps, "test_it_is_made_while_it_is_taken", "workload.streams"),
        (MadeBefore, "test_it_is_made_while_it_is_taken", "workload.streams"),
        (ReadsTheClock, "test_it_reads_no_clock_and_no_shared_random_numbers", "workload.no_clock"),
        (Shares, "test_it_reads_no_clock_and_no_shared_random_numbers", "workload.no_draws"),
        (SharesNumpys, "test_it_reads_no_clock_and_no_shared_random_numbers", "workload.no_draws"),
        (Talks, "test_it_says_in_a_line_what_it_is", "workload.description"),
        (TooLong, "test_it_runs_in_simulation", "workload.in_run"),
        (EverySecond, "test_it_runs_in_simulation", "workload.in_run"),
        (Empty, "test_it_runs_in_simulation", "workload.in_run"),
    ],
)
def test_a_broken_workload_is_found(make: type[Right], test: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planted, "make", make)
    with pytest.raises(ContractViolation) as caught:
        getattr(Suite(), test)()
    assert caught.value.rule == rule


class TestRightWorkload(Suite):
    """A suite without overrides tests the one descriptor that it has."""


class TestWorkloadThatDrawsNothing(Suite):
    draws = False

    @pytest.fixture(autouse=True)
    def planted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Planted, "make", NeverDraws)


def test_a_workload_that_draws_after_all_is_found() -> None:
    suite = Suite()
    suite.draws = False
    with pytest.raises(ContractViolation, match="draws = False, and two seeds give different requests"):
        suite.test_another_seed_gives_other_requests()


def test_a_suite_that_names_no_workload_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"which workload it tests: set overrides = \['workload=NAME'\]"):
        WorkloadContract().test_it_ends()
