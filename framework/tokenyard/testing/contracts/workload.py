"""WorkloadContract: what a workload must keep."""

from __future__ import annotations

import dataclasses
import itertools
import math
import tracemalloc
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from tokenyard.experiments.simulation import run_simulated
from tokenyard.experiments.workloads import make_workload
from tokenyard.interfaces.workload import COMPONENT_KIND, OUTPUT
from tokenyard.testing.contracts.base import Contract, Loaded, expect, no_errors
from tokenyard.testing.contracts.watch import noting
from tokenyard.testing.contracts.workload_play import Played, play

if TYPE_CHECKING:
    from tokenyard.experiments.records import RunRecord
    from tokenyard.interfaces.workload import Workload, WorkloadRequest

MOST_LOOKED_AT = 2000  # requests, by the rules that look at each
_MOST_TAKEN = 20_000  # requests, by the rule about memory
_FREE_BYTES, _BYTES_PER_REQUEST = 2 * 2**20, 40  # that it may hold; a list of all requests takes 200 bytes for each
_MOST_RUN = 40  # requests, in simulation
_RUN = ("executor=simulated", "latency=constant", "latency.per_step=0.01", "kv_cache.num_blocks=65536")


class WorkloadContract(Contract):
    """Set `overrides = ["workload=NAME"]`, with options `["workload=NAME", "workload.OPTION=1"]`.

    - `long`: more overrides, with which there are 20,000 requests; of fewer nobody can tell whether a workload keeps
      them all in memory.
    - `draws`: whether another seed gives other requests.
    - `most_requests`: how many there may be, follow-ups counted, before it is said to go on for ever.
    """

    _kind = COMPONENT_KIND
    _choice = "workload=NAME"

    long: Sequence[str] = ()
    draws: bool = True
    most_requests: int = 100_000

    def test_requests_come_in_order_of_arrival(self) -> None:
        """`workload.arrivals_sorted`: finite times from 0 on, none before the one before."""
        latest = 0.0
        for number, request in enumerate(_taken(_made(self.load()))):
            arrival = request.arrival
            expect(_is_time(arrival), "workload.arrivals_sorted", f"request {number} arrives at {arrival!r}")
            what = f"request {number} arrives at {arrival}, after one that arrives at {latest}"
            expect(latest <= arrival, "workload.arrivals_sorted", what)
            latest = arrival

    def test_every_request_has_a_prompt_and_an_output(self) -> None:
        """`workload.lengths_positive`: whole numbers of tokens, at least 1; follow-ups too."""
        for number, (request, _, _) in enumerate(_played(self.load())):
            for name, count in (("prompt", request.num_prompt_tokens), ("output", request.num_output_tokens)):
                is_count = type(count) is int and count >= 1
                expect(is_count, "workload.lengths_positive", f"request {number} has {count!r} {name} tokens")

    def test_contents_add_up_to_the_prompts(self) -> None:
        """`workload.content_adds_up`: segments of at least 1 token, and none where the workload tells no content."""
        loaded = self.load()
        has_content = _made(loaded).has_content
        for number, (request, _, _) in enumerate(_played(loaded)):
            if request.content is not None:
                _check_content(number, request, has_content=has_content)

    def test_hints_are_valid(self) -> None:
        """`workload.hints`: clients and sessions are text, priorities whole numbers, deadlines after arrival."""
        for number, (request, _, _) in enumerate(_played(self.load())):
            names = (request.client, request.session)
            is_valid = all(name is None or (isinstance(name, str) and name) for name in names)
            is_valid = is_valid and type(request.priority) is int
            is_valid = is_valid and (request.deadline is None or (_is_time(request.deadline) and request.deadline > 0))
            expect(bool(is_valid), "workload.hints", f"request {number} is {request}")

    def test_the_same_seed_gives_the_same_requests(self) -> None:
        """`workload.same_seed_same_requests`: whoever asks when, so that two policies meet the same ones."""
        loaded, rule = self.load(), "workload.same_seed_same_requests"
        first = _played(loaded)
        again = _played(loaded, is_eager=True)
        expect(len(first) == len(again), rule, f"{len(first)} requests, and {len(again)} when all were taken at once")
        for number, (one, other) in enumerate(zip(first, again, strict=True)):
            what = f"number {number} is {one.request} in one and {other.request} in the other"
            expect(one.request == other.request, rule, what)

    def test_another_seed_gives_other_requests(self) -> None:
        """`workload.other_seed_other_requests`: otherwise runs with several seeds are one sample; see `draws`."""
        loaded, rule = self.load(), "workload.other_seed_other_requests"
        found = [list(_taken(_made(loaded, seed_more=more))) for more in (0, 1)]
        same = found[0] == found[1]
        if self.draws:
            expect(not same, rule, "two seeds give the same requests; if that is meant, set draws = False")
        else:
            expect(same, rule, "draws = False, and two seeds give different requests")

    def test_follow_ups_come_after_the_end_that_they_follow(self) -> None:
        """`workload.follow_ups_not_before`: when a request ends is nothing that a workload knows beforehand."""
        for number, (_, end, follow_ups) in enumerate(_played(self.load())):
            for one in follow_ups:
                what = f"request {number} ends at {end}, and a follow-up of it arrives at {one.arrival!r}"
                expect(_is_time(one.arrival) and one.arrival >= end, "workload.follow_ups_not_before", what)

    def test_it_ends(self) -> None:
        """`workload.finite`: requests and follow-ups, in at most `most_requests`; `workload.limit` ends any."""
        played = play(_made(self.load()), self.most_requests)
        with no_errors("workload.never_raises"):
            count = sum(1 for _ in itertools.islice(played, self.most_requests))
        what = f"it goes on after {count} requests; if that is meant, set most_requests"
        expect(count < self.most_requests, "workload.finite", what)

    def test_it_is_made_while_it_is_taken(self) -> None:
        """`workload.streams`: nothing grows with its length; see `long`."""
        workload = _made(self.load(*self.long))
        count, held = _count_and_bytes(_taken(workload, _MOST_TAKEN))
        allowed = _FREE_BYTES + _BYTES_PER_REQUEST * count
        expect(held <= allowed, "workload.streams", f"it held {held} bytes for {count} requests; {allowed} are allowed")

    def test_it_reads_no_clock_and_no_shared_random_numbers(self) -> None:
        """`workload.no_clock`: it knows nothing but options and seed; nor shared generators, `workload.no_draws`."""
        loaded, clocks, draws = self.load(), list[str](), list[str]()
        _played(loaded)  # what is imported when it is first used may do as it likes
        with noting(clocks, draws, own_generators=True):
            _played(loaded)
        expect(not clocks, "workload.no_clock", f"it calls {', '.join(dict.fromkeys(clocks))}")
        expect(not draws, "workload.no_draws", f"it calls {', '.join(dict.fromkeys(draws))}")

    def test_it_says_in_a_line_what_it_is(self) -> None:
        """`workload.description`: text without a line break, or nothing."""
        with no_errors("workload.never_raises"):
            said = _made(self.load()).description
        is_line = isinstance(said, str) and len(said.splitlines()) <= 1
        expect(is_line, "workload.description", f"{said!r} is no line")

    def test_it_runs_in_simulation(self) -> None:
        """`workload.in_run`: two runs of its first requests are the same, and all of them end."""
        loaded = self.load(*_RUN)
        limit = min(loaded.config.workload.limit or _MOST_RUN, _MOST_RUN)
        workload = dataclasses.replace(loaded.config.workload, limit=limit)
        config = dataclasses.replace(loaded.config, workload=workload)
        runs: list[RunRecord] = []
        for _ in range(2):
            with no_errors("workload.in_run"):
                runs.append(run_simulated(config, loaded.catalogue))
        first, second = (_rows(run) for run in runs)
        expect(first == second, "workload.in_run", "two runs of it differ")
        expect(bool(first), "workload.in_run", "there is no request in it")


def _made(loaded: Loaded, *, seed_more: int = 0) -> Workload:
    config = dataclasses.replace(loaded.config, seed=loaded.config.seed + seed_more)
    return make_workload(config, loaded.catalogue)


def _taken(workload: Workload, most: int = MOST_LOOKED_AT) -> Iterator[WorkloadRequest]:
    with no_errors("workload.never_raises"):
        yield from itertools.islice(workload.requests(), most)


def _played(loaded: Loaded, *, is_eager: bool = False) -> Sequence[Played]:
    with no_errors("workload.never_raises"):
        return list(itertools.islice(play(_made(loaded), MOST_LOOKED_AT, is_eager=is_eager), MOST_LOOKED_AT))


def _is_time(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _check_content(number: int, request: WorkloadRequest, *, has_content: bool) -> None:
    rule, content = "workload.content_adds_up", request.content or ()
    expect(has_content, rule, f"request {number} has content, and the workload's has_content is false")
    for segment in content:
        is_known = type(segment.content) is int and (segment.content == OUTPUT or 0 <= segment.content < 2**64)
        is_long = type(segment.num_tokens) is int and segment.num_tokens >= 1
        expect(is_known and is_long, rule, f"request {number} has {segment}")
    total = sum(segment.num_tokens for segment in content)
    what = f"request {number} has a prompt of {request.num_prompt_tokens} tokens, and segments of {total}"
    expect(total == request.num_prompt_tokens, rule, what)


def _count_and_bytes(requests: Iterator[WorkloadRequest]) -> tuple[int, int]:
    """How many there are, and the most memory that Python's objects took meanwhile."""
    was_tracing = tracemalloc.is_tracing()
    if not was_tracing:
        tracemalloc.start()
    try:
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        count = sum(1 for _ in requests)
        return count, tracemalloc.get_traced_memory()[1] - before
    finally:
        if not was_tracing:
            tracemalloc.stop()


def _rows(run: RunRecord) -> Sequence[tuple[object, ...]]:
    """Times are told as text: NaN is not equal to itself."""
    table = run.requests
    times = [map(str, one.tolist()) for one in (table.arrival, table.first_scheduled, table.first_token, table.finish)]
    counts = [one.tolist() for one in (table.prompt, table.output, table.cached, table.status)]
    return list(zip(*times, *counts, strict=True))
