"""PolicyContract: what a scheduling policy must keep, whatever it decides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, TypeAlias, TypeVar, cast

import pytest

from tokenyard.interfaces.policy import PreemptMode, SchedulingPolicy
from tokenyard.interfaces.predictor import ORACLES
from tokenyard.request import FinishReason
from tokenyard.testing.contracts.base import AMPLE, Contract, Shape, check_same_tokens, expect, no_errors
from tokenyard.testing.contracts.starvation import SCENARIOS, steps_until_it_ends
from tokenyard.testing.contracts.traces import Add, Operation, Player, arrivals, play, shapes, traces
from tokenyard.testing.contracts.watch import watch, watch_changes
from tokenyard.testing.errors import ContractViolation
from tokenyard.testing.policy_calls import surround

if TYPE_CHECKING:
    from tokenyard.interfaces.policy import RequestView
    from tokenyard.testing.contracts.base import Loaded
    from tokenyard.testing.harness import EngineHarness

PartT = TypeVar("PartT")
MakePlayer: TypeAlias = "Callable[[EngineHarness], Player]"

MODES = tuple(mode.value for mode in PreemptMode)
_SALTS = ("", "-of-another-hash", "-x")


def _another_length(add: Add) -> int:
    """Not that of its output."""
    return 1 + (7 * add.num_outputs + 3) % 23


class _EndsTold:
    """Whom `on_finish` was told of, if the policy wants to know."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def decorate(self, part: PartT, /) -> PartT:
        if isinstance(part, SchedulingPolicy):
            surround(part, self._note, ["on_finish"])
        return part

    def _note(self, name: str, method: Callable[..., object], arguments: Sequence[object]) -> object:
        self.names.extend(request.request_id for request in cast("Sequence[RequestView]", arguments[0]))
        return method(*arguments)


class PolicyContract(Contract):
    """Set `overrides = ["scheduler=NAME"]`.

    A policy that lets a request wait for ever says so with an attribute `may_starve = True`, and is excused from
    `policy.bounded_waiting`. `patience` and `seconds_per_step` say how long a request may take at most in that test.
    """

    _kind = "policy"
    _choice = "scheduler=NAME"

    patience: int = 600  # steps
    seconds_per_step: float = 10.0

    @pytest.mark.parametrize("preempt_mode", MODES)
    def test_every_request_ends_exactly_once(self, preempt_mode: str) -> None:
        """`policy.sound`: under any trace nobody is forgotten, no block lost, nobody waits who fits (engine rules)."""
        loaded = self.load()

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("policy.raises"):
                play(loaded.harness(shape), trace)

        self.for_all(check, traces(), shapes(preempt_mode), max_examples=self._few)

    @pytest.mark.parametrize("preempt_mode", MODES)
    def test_tokens_do_not_depend_on_the_schedule(self, preempt_mode: str) -> None:
        """`policy.same_tokens`: waiting, chunks and preemptions of each mode change when a token comes, never which."""
        loaded = self.load()

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("policy.raises"):
                crowded, ample = play(loaded.harness(shape), trace), play(loaded.harness(AMPLE), trace)
            check_same_tokens("policy.same_tokens", crowded, ample, "a small and an ample engine differ")

        self.for_all(check, arrivals(), shapes(preempt_mode), max_examples=self._few)

    @pytest.mark.parametrize("preempt_mode", MODES)
    def test_tokens_are_the_same_under_overlap(self, preempt_mode: str) -> None:
        """`policy.same_under_overlap`: a policy is right under a loop with several steps in flight too."""
        loaded, overlap = self.load(), self.load("engine=overlap")

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("policy.raises"):
                one, other = play(loaded.harness(shape), trace), play(overlap.harness(shape), trace)
            check_same_tokens("policy.same_under_overlap", one, other, "the loops differ")

        self.for_all(check, arrivals(), shapes(preempt_mode), max_examples=self._few)

    def test_schedules_are_deterministic(self) -> None:
        """`policy.deterministic`: a schedule depends on the requests and the seed alone."""
        self._same_schedules("policy.deterministic", [Player, Player], "two runs of one trace differ")

    def test_ties_do_not_depend_on_hashes(self) -> None:
        """`policy.ties`: the order of a set, or of anything else that depends on hashes, decides nothing."""
        players: list[MakePlayer] = [partial(Player, salt=salt) for salt in _SALTS]
        self._same_schedules("policy.ties", players, "ids of another hash, in the same order, change the schedule")

    def test_true_output_lengths_come_from_an_oracle_alone(self) -> None:
        """`policy.oracle_boundary`: how long an output will be is told by `view.predictor`, and by an oracle alone."""
        if self.load().config.scheduler.predictor in ORACLES:
            pytest.skip("it is run with an oracle, by name")
        players: list[MakePlayer] = [Player, partial(Player, tells=_another_length)]
        self._same_schedules("policy.oracle_boundary", players, "another true output length changes the schedule")

    def test_it_changes_nothing_that_it_is_given(self) -> None:
        """`policy.changes_nothing`: requests, sequences and the view are read, never written to."""
        changes: list[str] = []
        self._watched(lambda policy: watch_changes(policy, changes))
        if changes:
            raise ContractViolation("policy.changes_nothing", f"what is given is not its own: {changes[0]}")

    def test_it_reads_no_clock_but_the_views(self) -> None:
        """`policy.no_wall_clock`: time comes from `view.now`, so that a policy does the same in simulation."""
        clocks: list[str] = []
        self._watched(lambda policy: watch(policy, clocks, []))
        if clocks:
            raise ContractViolation("policy.no_wall_clock", f"the policy reads a clock of its own: {clocks[0]}")

    def test_it_draws_no_random_numbers_but_the_views(self) -> None:
        """`policy.no_own_randomness`: random numbers come from `view.rng`, which the run's seed decides."""
        draws: list[str] = []
        self._watched(lambda policy: watch(policy, [], draws))
        if draws:
            raise ContractViolation("policy.no_own_randomness", f"the policy draws numbers of its own: {draws[0]}")

    @pytest.mark.parametrize("preempt_mode", MODES)
    def test_ending_is_idempotent(self, preempt_mode: str) -> None:
        """`policy.finish_idempotent`: requests may be ended wherever they are, and twice; `on_finish` is told once."""
        loaded, told = self.load(), _EndsTold()
        harness = loaded.harness(Shape(max_num_seqs=2, preempt_mode=preempt_mode), decorate=told.decorate)
        with no_errors("policy.raises"):
            names = [harness.add(range(6), max_tokens=9) for _ in range(5)]
            harness.finish([harness.add(range(6)), *names[:1]])  # they have never run
            for number, name in enumerate(names):
                harness.step()
                harness.finish([name, "nobody", name], FinishReason.ABORT if number % 2 else FinishReason.STOP)
                harness.finish(names[: number + 1])
            harness.run()
        harness.check_idle()
        wrong = [name for name in told.names if told.names.count(name) != 1]
        expect(not wrong, "policy.finish_idempotent", f"on_finish was told more than once of {wrong}")

    @pytest.mark.parametrize("scenario", SCENARIOS)
    def test_waiting_is_bounded(self, scenario: str) -> None:
        """`policy.bounded_waiting`: no stream of others, all unlike it, keeps a request from its end for ever."""
        self._bounded(self.load(), scenario)

    def test_turns_are_bounded(self) -> None:
        """`policy.bounded_waiting`: the same where who loses its turn keeps its K/V (`preempt_mode=pause`)."""
        loaded = self.load("scheduler.preempt_mode=pause")
        for scenario in ("long and patient", "a long output", "of a client that had much"):
            self._bounded(loaded, scenario)

    # Helpers

    @property
    def _few(self) -> int:
        """Examples of a rule that is tried in each mode of preemption, or costs more than others."""
        return max(1, self.max_examples // 2)

    def _bounded(self, loaded: Loaded, scenario: str) -> None:
        harness = loaded.harness(SCENARIOS[scenario].shape)
        if getattr(harness.policy, "may_starve", False):  # an attribute that a policy need not have
            pytest.skip("the policy says may_starve = True")
        with no_errors("policy.raises"):
            num_steps = steps_until_it_ends(
                harness, SCENARIOS[scenario], patience=self.patience, seconds_per_step=self.seconds_per_step
            )
        if num_steps is None:
            raise ContractViolation("policy.bounded_waiting", self._starved(harness, scenario))

    def _starved(self, harness: EngineHarness, scenario: str) -> str:
        waiter = harness.request("waiter")
        return (
            f"a request {scenario}, among others that are not, has not ended after {self.patience} steps and "
            f"{len(harness.requests) - 1} others: it is {waiter.status.value}, with {len(waiter.output_token_ids)} "
            f"tokens and {waiter.num_preemptions} preemptions; say may_starve = True if that is meant"
        )

    def _same_schedules(self, rule: str, players: Sequence[MakePlayer], what: str) -> None:
        loaded = self.load()

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            first, *others = [self._schedule(make(loaded.harness(shape)), trace) for make in players]
            for other in others:
                if first != other:
                    pairs = enumerate(zip_longest(first, other))
                    step, (one, another) = next((step, pair) for step, pair in pairs if pair[0] != pair[1])
                    raise ContractViolation(rule, f"{what}: step {step} is {one} and {another}")

        self.for_all(check, traces(), shapes(), max_examples=self._few)

    def _schedule(self, player: Player, trace: Sequence[Operation]) -> list[dict[str, int]]:
        with no_errors("policy.raises"):
            player.play(trace)
            player.finish()
        return player.schedule

    def _watched(self, attach: Callable[[SchedulingPolicy], None]) -> None:
        """Play traces with something attached to the policy."""
        loaded = self.load()

        def decorate(part: PartT, /) -> PartT:
            if isinstance(part, SchedulingPolicy):
                attach(part)
            return part

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("policy.raises"):
                play(loaded.harness(shape, decorate=decorate), trace)

        self.for_all(check, traces(), shapes(), max_examples=self._few)
