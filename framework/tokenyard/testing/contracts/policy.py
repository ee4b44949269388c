"""PolicyContract: what a scheduling policy must keep, whatever it decides."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeVar

import pytest

from tokenyard.interfaces.policy import SchedulingPolicy
from tokenyard.interfaces.scheduler import RequestStatus
from tokenyard.testing.contracts.base import AMPLE, Contract, Shape, check_equal, no_errors
from tokenyard.testing.contracts.traces import Operation, Player, arrivals, play, shapes, traces
from tokenyard.testing.contracts.watch import watch
from tokenyard.testing.errors import ContractViolation

if TYPE_CHECKING:
    from tokenyard.testing.harness import EngineHarness

PartT = TypeVar("PartT")

_CROWDED = Shape(max_num_seqs=2, max_num_batched_tokens=16, num_blocks=40)


class PolicyContract(Contract):
    """Set `overrides = ["scheduler=NAME"]`.

    A policy that lets a request wait for ever says so with an attribute `may_starve = True`, and is excused from
    `policy.bounded_waiting`. `patience` and `seconds_per_step` say how long a request may wait at most in that test.
    """

    _kind = "policy"
    _choice = "scheduler=NAME"

    patience: int = 600  # steps
    seconds_per_step: float = 10.0

    def test_every_request_ends_exactly_once(self) -> None:
        """`policy.sound`: under any trace no request is lost, no block leaks, nobody waits who fits (engine rules)."""
        loaded = self.load()

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("policy.raises"):
                play(loaded.harness(shape), trace)

        self.for_all(check, traces(), shapes())

    def test_tokens_do_not_depend_on_the_schedule(self) -> None:
        """`policy.same_tokens`: waiting, chunks and preemptions change when a token comes, never which."""
        loaded = self.load()

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("policy.raises"):
                crowded, ample = play(loaded.harness(shape), trace), play(loaded.harness(AMPLE), trace)
            check_equal("policy.same_tokens", crowded, ample, "a small and an ample engine differ")

        self.for_all(check, arrivals(), shapes())

    def test_tokens_are_the_same_under_overlap(self) -> None:
        """`policy.same_under_overlap`: a policy is right under a loop with several steps in flight too."""
        loaded, overlap = self.load(), self.load("engine=overlap")

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("policy.raises"):
                one, other = play(loaded.harness(shape), trace), play(overlap.harness(shape), trace)
            check_equal("policy.same_under_overlap", one, other, "the loops differ")

        self.for_all(check, arrivals(), shapes())

    def test_schedules_are_deterministic(self) -> None:
        """`policy.deterministic`: a schedule depends on the requests and the seed alone."""
        loaded = self.load()

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            first, second = Player(loaded.harness(shape)), Player(loaded.harness(shape))
            with no_errors("policy.raises"):
                for player in (first, second):
                    player.play(trace)
                    while player.harness.has_requests:
                        player.step()
            if first.schedule != second.schedule:
                pairs = enumerate(zip_longest(first.schedule, second.schedule))
                step, (one, other) = next((step, pair) for step, pair in pairs if pair[0] != pair[1])
                raise ContractViolation(
                    "policy.deterministic", f"step {step} is {one} in one run and {other} in the other"
                )

        self.for_all(check, traces(), shapes())

    def test_it_reads_no_clock_but_the_views(self) -> None:
        """`policy.no_wall_clock`: time comes from `view.now`, so that a policy does the same in simulation."""
        clocks, _ = self._watched()
        if clocks:
            raise ContractViolation("policy.no_wall_clock", f"the policy reads a clock of its own: {clocks[0]}")

    def test_it_draws_no_random_numbers_but_the_views(self) -> None:
        """`policy.no_own_randomness`: random numbers come from `view.rng`, which the run's seed decides."""
        _, draws = self._watched()
        if draws:
            raise ContractViolation("policy.no_own_randomness", f"the policy draws numbers of its own: {draws[0]}")

    @pytest.mark.parametrize("is_long", [True, False], ids=["long", "short"])
    @pytest.mark.parametrize("is_urgent", [True, False], ids=["urgent", "patient"])
    def test_waiting_is_bounded(self, is_long: bool, is_urgent: bool) -> None:
        """`policy.bounded_waiting`: a stream of others, all unlike it, does not keep a request waiting for ever."""
        loaded = self.load()
        harness = loaded.harness(_CROWDED)
        if getattr(harness.policy, "may_starve", False):  # an attribute that a policy need not have
            pytest.skip("the policy says may_starve = True")
        others = {"size": 2 if is_long else 20, "priority": 9 if is_urgent else 0}
        with no_errors("policy.raises"):
            for _ in range(3):
                self._arrive(harness, **others)
            harness.step()
            waiter = harness.add(range(20 if is_long else 2), "waiter", priority=0 if is_urgent else 9, client="one")
            for _ in range(self.patience):
                while harness.stats.num_waiting < 4:
                    self._arrive(harness, **others)
                harness.advance(self.seconds_per_step)
                harness.step()
                if harness.request(waiter).status is not RequestStatus.WAITING:
                    return
        raise ContractViolation(
            "policy.bounded_waiting",
            f"a {'long' if is_long else 'short'}, {'urgent' if is_urgent else 'patient'} request still waits after "
            f"{self.patience} steps and {len(harness.requests) - 1} others; say may_starve = True if that is meant",
        )

    def _arrive(self, harness: EngineHarness, *, size: int, priority: int) -> None:
        harness.add(range(500, 500 + size), priority=priority, max_tokens=2, client="many")

    def _watched(self) -> tuple[list[str], list[str]]:
        loaded = self.load()
        clocks: list[str] = []
        draws: list[str] = []

        def decorate(part: PartT, /) -> PartT:
            if isinstance(part, SchedulingPolicy):
                watch(part, clocks, draws)
            return part

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("policy.raises"):
                play(loaded.harness(shape, decorate=decorate), trace)

        self.for_all(check, traces(), shapes())
        return clocks, draws
