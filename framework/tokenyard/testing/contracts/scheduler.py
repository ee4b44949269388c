"""SchedulerContract: what a whole scheduler must keep, whatever order it chooses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tokenyard.errors import CapacityError, UnsupportedError, ValidationError
from tokenyard.interfaces.scheduler import Scheduler
from tokenyard.request import FinishReason
from tokenyard.testing.contracts.base import AMPLE, Contract, Shape, check_equal, expect, no_errors
from tokenyard.testing.contracts.traces import Operation, Player, arrivals, play, shapes, traces
from tokenyard.testing.errors import ContractViolation

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.testing.harness import EngineHarness

_SMALL = Shape(max_num_seqs=2, max_num_batched_tokens=8, num_blocks=8, block_size=4)  # 32 tokens


class SchedulerContract(Contract):
    """Set `overrides = ["scheduler=NAME"]`; a scheduler that takes a policy is run with the policy that this names."""

    _kind = "scheduler"
    _choice = "scheduler=NAME"

    def test_every_request_ends_exactly_once(self) -> None:
        """`scheduler.sound`: under any trace the engine rules hold: budget, slots, blocks, tokens, ends, progress."""
        loaded = self.load()

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("scheduler.raises"):
                play(loaded.harness(shape), trace)

        self.for_all(check, traces(), shapes())

    def test_several_steps_may_be_in_flight(self) -> None:
        """`scheduler.sound_in_flight`: the same, when a step is scheduled before the one before it has landed."""
        loaded = self.load("engine=overlap")

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("scheduler.raises"):
                play(loaded.harness(shape), trace)

        self.for_all(check, traces(), shapes())

    def test_tokens_do_not_depend_on_the_schedule(self) -> None:
        """`scheduler.same_tokens`: the same tokens in a crowded engine, an ample one, and with steps in flight."""
        loaded, overlap = self.load(), self.load("engine=overlap")

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("scheduler.raises"):
                crowded, ample = play(loaded.harness(shape), trace), play(loaded.harness(AMPLE), trace)
                in_flight = play(overlap.harness(shape), trace)
            check_equal("scheduler.same_tokens", crowded, ample, "a small and an ample engine differ")
            check_equal("scheduler.same_tokens", crowded, in_flight, "one step and several in flight differ")

        self.for_all(check, arrivals(), shapes())

    def test_logprobs_stay_with_their_tokens(self) -> None:
        """`scheduler.logprobs`: sampled tokens keep theirs, and a prompt's are complete before its first output."""
        loaded, overlap = self.load(), self.load("engine=overlap")

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("scheduler.raises"):
                for one in (loaded, overlap):
                    play(one.harness(shape), trace, asks_logprobs=True)

        self.for_all(check, traces(), shapes())

    def test_schedules_are_deterministic(self) -> None:
        """`scheduler.deterministic`: a schedule depends on the requests and the seed alone."""
        loaded = self.load()

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            players = [Player(loaded.harness(shape)) for _ in range(2)]
            with no_errors("scheduler.raises"):
                for player in players:
                    player.play(trace)
                    player.finish()
            if players[0].schedule != players[1].schedule:
                raise ContractViolation("scheduler.deterministic", "two runs of one trace have different steps")

        self.for_all(check, traces(), shapes())

    def test_nothing_to_do_is_no_step(self) -> None:
        """`scheduler.none_when_idle`: `schedule` returns None, never an empty step."""
        harness = self.load().harness(_SMALL)
        expect(harness.scheduler.schedule() is None, "scheduler.none_when_idle", "a step without requests")
        harness.finish(harness.add([1, 2, 3]))
        expect(harness.scheduler.schedule() is None, "scheduler.none_when_idle", "a step after every request ended")

    def test_ending_is_idempotent(self) -> None:
        """`scheduler.finish_idempotent`: unknown and ended ids are ignored; an id given twice ends once."""
        harness = self.load().harness(_SMALL)
        running, waiting = (harness.add([1, 2, 3], max_tokens=9) for _ in range(2))
        harness.step()
        scheduler, abort = harness.scheduler, FinishReason.ABORT
        ended = list(scheduler.finish_requests([running, "nobody", waiting, running], abort))
        expect(sorted(ended) == sorted([running, waiting]), "scheduler.finish_idempotent", f"it returned {ended}")
        again = list(scheduler.finish_requests([running, waiting], abort))
        expect(not again, "scheduler.finish_idempotent", f"a second call ended {again} again")
        expect(not scheduler.has_requests(), "scheduler.finish_idempotent", "has_requests() is still true")

    def test_a_request_that_can_never_run_is_refused(self) -> None:
        """`scheduler.refuses_whole`: too long for the cache, an id in use: it raises and leaves no trace."""
        harness = self.load("model.max_model_len=64").harness(_SMALL)
        self._refused(harness, lambda: harness.add(range(40)), CapacityError)  # the pool holds 32
        self._refused(harness, lambda: harness.add(range(70)), ValidationError)
        self._refused(harness, lambda: harness.add([]), ValidationError)
        self._refused(harness, lambda: harness.add([1 << 20]), ValidationError)
        harness.add([1, 2, 3], "taken")
        self._refused(harness, lambda: harness.add([4], "taken"), ValidationError)
        with no_errors("scheduler.raises"):
            harness.run()
        harness.check_idle()

    def test_an_id_may_be_used_again(self) -> None:
        """`scheduler.id_reuse`: once a request has ended, its id is free."""
        harness = self.load().harness(_SMALL)
        with no_errors("scheduler.id_reuse"):
            for _ in range(3):
                harness.add([1, 2, 3], "again", max_tokens=2)
                harness.run()
        harness.check_idle()

    def test_nobody_is_preempted_without_need(self) -> None:
        """`scheduler.no_needless_preemption`: where blocks suffice, or one request is alone, nobody loses its place."""
        loaded = self.load()

        def check(trace: Sequence[Operation]) -> None:
            harness = loaded.harness(Shape(max_num_seqs=4, max_num_batched_tokens=8, num_blocks=4 * 11, block_size=4))
            with no_errors("scheduler.raises"):
                play(harness, trace)
            self._no_preemption(harness)

        self.for_all(check, arrivals())
        alone = loaded.harness(Shape(num_blocks=8, block_size=4))
        alone.add(range(20), max_tokens=30)  # outgrows the pool of 32 tokens: it ends there
        alone.run(100)
        self._no_preemption(alone)

    def test_the_prefix_cache_is_reset_only_when_nothing_is_held(self) -> None:
        """`scheduler.reset`: False while a request holds blocks, True when none does."""
        harness = self.load().harness(_SMALL)
        harness.add(range(6), max_tokens=3)
        harness.step()
        expect(not harness.scheduler.reset_prefix_cache(), "scheduler.reset", "it reset what a request holds")
        harness.run()
        expect(harness.scheduler.reset_prefix_cache(), "scheduler.reset", "it refused although nothing is held")

    def test_a_failed_request_ends_alone(self) -> None:
        """`scheduler.error_is_contained`: an error of one request in a step ends that one, with its text."""
        harness = self.load().harness(_SMALL)
        bad, good = harness.add([1, 2], max_tokens=3), harness.add([3, 4], max_tokens=3)
        with no_errors("scheduler.error_is_contained"):
            harness.step(errors={bad: "no luck"})
            harness.run()
        ends = [(row.finish_reason, row.error) for row in (harness.request(bad), harness.request(good))]
        expected = [(FinishReason.ERROR, "no luck"), (FinishReason.LENGTH, None)]
        expect(ends == expected, "scheduler.error_is_contained", f"the two ended with {ends}")
        harness.check_idle()

    def test_deadlines_end_requests_wherever_they_are(self) -> None:
        """`scheduler.deadline`: past its deadline a request ends with `abort`, running or waiting."""
        harness = self.load().harness(Shape(max_num_seqs=1))
        if type(harness.scheduler).take_finished is Scheduler.take_finished:
            pytest.skip("written for plugin API 1.1, which had no deadlines")
        late = [harness.add([1, 2, 3], max_tokens=20, deadline=5.0) for _ in range(2)]
        in_time = harness.add([1, 2, 3], max_tokens=4)
        harness.step()
        harness.advance(6.0)
        with no_errors("scheduler.deadline"):
            harness.run()
        reasons = [harness.request(name).finish_reason for name in (*late, in_time)]
        expected = [FinishReason.ABORT, FinishReason.ABORT, FinishReason.LENGTH]
        expect(reasons == expected, "scheduler.deadline", f"they ended with {reasons}")

    def test_admission_can_be_paused(self) -> None:
        """`scheduler.pause_admission`: what runs goes on, nothing starts, until it is undone."""
        harness = self.load().harness(_SMALL)
        first = harness.add([1, 2, 3], max_tokens=3)
        harness.step()
        try:
            harness.pause("wait")
        except UnsupportedError:
            pytest.skip("it cannot pause admission, and says so")
        second = harness.add([4, 5, 6], max_tokens=3)
        for _ in range(4):
            harness.step()
        states = (harness.request(first).finish_reason, len(harness.request(second).output_token_ids))
        expect(states == (FinishReason.LENGTH, 0), "scheduler.pause_admission", f"after 4 steps: {states}")
        harness.resume()
        harness.run()
        harness.check_idle()

    def test_steps_are_never_changed_afterwards(self) -> None:
        """`scheduler.output_is_a_copy`: a SchedulerOutput stays what it was when it was handed over."""
        harness = self.load().harness(_SMALL)
        harness.add(range(6), max_tokens=6)
        harness.step()
        output = harness.last_outputs[0]
        before = [np.array(array) for array in _arrays(output)]
        harness.add(range(6), max_tokens=6)
        harness.run()
        same = all(np.array_equal(one, other) for one, other in zip(before, _arrays(output), strict=True))
        expect(same, "scheduler.output_is_a_copy", f"step {output.step} changed after it was handed over")

    def _refused(self, harness: EngineHarness, add: Callable[[], object], error: type[Exception]) -> None:
        before = (harness.stats, harness.has_requests, harness.kv.num_free)
        try:
            add()
        except error:
            pass
        else:
            raise ContractViolation(
                "scheduler.refuses_whole", f"a request was accepted that should raise {error.__name__}"
            )
        after = (harness.stats, harness.has_requests, harness.kv.num_free)
        expect(before == after, "scheduler.refuses_whole", f"a refused request left a trace: {before} to {after}")

    def _no_preemption(self, harness: EngineHarness) -> None:
        count = harness.stats.num_preemptions
        expect(not count, "scheduler.no_needless_preemption", f"{count} preemptions, and blocks for all")


def _arrays(output: SchedulerOutput) -> list[NDArray[np.generic]]:
    starts = [*output.new, *output.resumed]
    return [
        output.slots,
        output.generations,
        output.num_computed_tokens,
        output.num_scheduled_tokens,
        output.samples,
        *(start.token_ids for start in starts),
        *(block_ids for start in starts for block_ids in start.block_ids),
        *(update.block_ids for update in output.block_table_updates),
    ]
