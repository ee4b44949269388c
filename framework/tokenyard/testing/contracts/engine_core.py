"""EngineCoreContract: what an engine loop must keep, however many steps it has in flight."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tokenyard.descriptors import ObserverDescriptor
from tokenyard.errors import EngineDeadError
from tokenyard.interfaces.observer import Observer, ObserverContext
from tokenyard.request import FinishReason
from tokenyard.testing.contracts.base import Contract, Loaded, Shape, check_equal, expect, no_errors
from tokenyard.testing.contracts.recorders import Recorder, RecordingObserver
from tokenyard.testing.contracts.traces import Operation, arrivals, play, shapes, traces
from tokenyard.testing.errors import ContractViolation

if TYPE_CHECKING:
    import pytest

    from tokenyard.config import NoOptions
    from tokenyard.engine_outputs import EngineCoreOutputs
    from tokenyard.scheduler_output import SchedulerOutput
    from tokenyard.testing.harness import EngineHarness

_SMALL = Shape(max_num_seqs=2, max_num_batched_tokens=16, num_blocks=40)


class EngineCoreContract(Contract):
    """Set `overrides = ["engine=NAME"]`."""

    _kind = "engine"
    _choice = "engine=NAME"

    def test_under_any_trace_the_engine_is_sound(self) -> None:
        """`engine.sound`: requests end once, blocks come back, nobody gets a token after its end (engine rules)."""
        loaded = self.load()

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("engine.raises"):
                play(loaded.harness(shape), trace)

        self.for_all(check, traces(), shapes())

    def test_tokens_are_those_of_the_plain_loop(self) -> None:
        """`engine.same_tokens`: a request's tokens and end are those of `engine=sync`."""
        loaded, plain = self.load(), self.load("engine=sync")

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            with no_errors("engine.raises"):
                own, expected = play(loaded.harness(shape), trace), play(plain.harness(shape), trace)
            check_equal("engine.same_tokens", own, expected, "the loop and engine=sync differ")

        self.for_all(check, arrivals(), shapes())

    def test_a_step_is_scheduled_executed_sampled_and_updated_once_in_order(self) -> None:
        """`engine.order`: steps may overlap, but each goes through all four calls, once and in order."""
        loaded = self.load()

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            recorder = Recorder()
            harness = loaded.harness(shape, decorate=recorder.decorate)
            with no_errors("engine.order"):
                play(harness, trace)
            recorder.check_order()

        self.for_all(check, traces(), shapes())

    def test_an_idle_engine_says_that_nothing_ran(self) -> None:
        """`engine.idle`: without requests `step` returns `did_run=False` and nothing is executed."""
        harness = self.load().harness(_SMALL)
        expect(not harness.has_requests, "engine.idle", "has_requests() is true in a new engine")
        outputs = harness.step()
        ran = outputs.did_run or harness.last_outputs
        expect(not ran, "engine.idle", "a step ran without requests")

    def test_what_is_in_flight_lands_after_its_request_was_ended(self) -> None:
        """`engine.lands_all`: no token for an ended request; `has_requests` until its last step has landed."""
        harness = self.load().harness(_SMALL)
        name = harness.add(range(6), max_tokens=20)
        harness.step()
        num_tokens = len(harness.request(name).output_token_ids)
        harness.finish(name)
        for _ in range(10):
            if not harness.has_requests:
                break
            harness.step()
        harness.check_idle()
        more = harness.request(name).output_token_ids[num_tokens:]
        expect(not more, "request.no_token_after_end", f"tokens {more} came after the abort")

    def test_a_pause_that_keeps_stops_everything_and_loses_nothing(self) -> None:
        """`engine.pause_keep`: nothing starts until `resume`; then everything goes on."""
        harness, names = self._two()
        harness.pause("keep")
        self._settle(harness)
        outputs = harness.step()
        expect(not outputs.did_run and not harness.last_outputs, "engine.pause_keep", "a step ran while paused")
        expect(harness.has_requests, "engine.pause_keep", "has_requests() is false, but two requests are kept")
        harness.resume()
        with no_errors("engine.pause_keep"):
            harness.run()
        ends = [harness.request(name).finish_reason for name in names]
        expect(ends == [FinishReason.LENGTH] * 2, "engine.pause_keep", f"they ended with {ends}")
        harness.check_idle()

    def test_a_pause_that_waits_lets_those_that_run_end(self) -> None:
        """`engine.pause_wait`: what has started runs to its end, what has not waits."""
        harness, (first, second) = self._two()
        with no_errors("engine.pause_wait"):
            harness.pause("wait")
            late = harness.add([1, 2, 3], max_tokens=2)
            for _ in range(30):
                harness.step()
        states = [harness.request(name).finish_reason for name in (first, second, late)]
        expected = [FinishReason.LENGTH, FinishReason.LENGTH, None]
        expect(states == expected, "engine.pause_wait", f"after 30 steps the two and the late one are {states}")
        harness.resume()
        harness.run()
        harness.check_idle()

    def test_a_pause_that_aborts_ends_all_and_holds_back_new_ones(self) -> None:
        """`engine.pause_abort`: every request ends and is named; one that comes meanwhile and is aborted never runs."""
        harness, names = self._two()
        ended = harness.pause("abort")
        expect(sorted(ended) == sorted(names), "engine.pause_abort", f"it returned {ended}, alive were {names}")
        self._settle(harness)
        late, aborted = harness.add([1, 2, 3], max_tokens=2), harness.add([4, 5, 6], max_tokens=2)
        harness.step()
        harness.finish(aborted)
        expect(not harness.last_outputs, "engine.pause_abort", "a step ran while paused")
        harness.resume()
        harness.run()
        outputs = [len(harness.request(name).output_token_ids) for name in (late, aborted)]
        expect(outputs == [2, 0], "engine.pause_abort", f"the late request and the aborted one have {outputs} tokens")
        harness.check_idle()

    def test_a_second_pause_replaces_the_first(self) -> None:
        """`engine.pause_replaces`: the mode of the last `pause` holds, and one `resume` undoes it."""
        harness, names = self._two()
        harness.pause("keep")
        with no_errors("engine.pause_replaces"):
            harness.pause("wait")
            for _ in range(30):
                harness.step()
        ends = [harness.request(name).finish_reason for name in names]
        expect(ends == [FinishReason.LENGTH] * 2, "engine.pause_replaces", f"under 'wait' they are {ends}")

    def test_ends_outside_a_step_are_told(self) -> None:
        """`engine.tells_ends`: a deadline ends a request also while paused; `wake_at` says when to look."""
        harness = self.load().harness(_SMALL)
        name = harness.add([1, 2, 3], deadline=5.0)
        harness.pause("keep")
        moment = harness.core.wake_at()
        expect(moment is not None and moment <= 5.0, "engine.tells_ends", f"wake_at() is {moment}, a deadline is 5.0")
        harness.advance(6.0)
        outputs = harness.step()
        told = [end.request_id for end in outputs.finished]
        expect(told == [name] and outputs.did_run, "engine.tells_ends", f"after the deadline the step told {told}")

    def test_it_waits_until_a_step_is_ready(self) -> None:
        """`engine.waits_for_steps`: a future's `ready_at` is awaited on the engine's clock."""
        harness = self.load().harness(_SMALL, step_seconds=1.0)
        harness.add([1, 2, 3], max_tokens=4)
        harness.run()
        now, steps = harness.clock.now(), harness.stats.num_steps
        expect(now >= 4.0, "engine.waits_for_steps", f"{steps} steps of one second took until {now}")

    def test_a_step_that_raises_ends_the_engine(self) -> None:
        """`engine.dies_cleanly`: EngineDeadError from then on, with the cause; nothing is left to wait for."""
        harness, _ = self._two()
        harness.executor.failure = RuntimeError("the worker is gone")
        for call in (self._step_to_the_failure(harness), harness.core.step):
            self._dies(call)
        expect(not harness.has_requests, "engine.dies_cleanly", "has_requests() is true in a dead engine")
        with no_errors("engine.dies_cleanly"):
            harness.core.shutdown()

    def test_shutting_down_is_idempotent(self) -> None:
        """`engine.shutdown_once`: the executor is stopped once, however often and when it is called."""
        harness, _ = self._two()
        with no_errors("engine.shutdown_once"):
            harness.core.shutdown()
            harness.core.shutdown()
        count = harness.executor.num_shutdowns
        expect(count == 1, "engine.shutdown_once", f"the executor was shut down {count} times")

    def test_observers_are_told_every_step_once_in_order(self) -> None:
        """`engine.observers_told`: each step that was updated, once, in order; the shutdown once."""
        told: list[RecordingObserver] = []

        def make() -> Observer:
            told.append(RecordingObserver())
            return told[-1]

        loaded = self._with_observers(make)

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            harness = loaded.harness(shape)
            play(harness, trace)
            for _ in range(2):
                harness.core.shutdown()
            steps = list(range(harness.stats.num_steps))
            expect(told[-1].steps == steps, "engine.observers_told", f"of steps {steps} it was told {told[-1].steps}")
            count = told[-1].num_shutdowns
            expect(count == 1, "engine.observers_told", f"on_shutdown came {count} times")

        self.for_all(check, traces(), shapes())

    def test_an_observer_that_fails_is_switched_off(self, caplog: pytest.LogCaptureFixture) -> None:
        """`engine.observer_failure`: with a warning, and without harm to the others and to the requests."""
        broken, good = _Broken(), RecordingObserver()
        harness = self._with_observers(lambda: broken, lambda: good).harness(_SMALL)
        name = harness.add([1, 2, 3], max_tokens=4)
        with no_errors("engine.observer_failure"), caplog.at_level(logging.WARNING):
            harness.run()
            harness.core.shutdown()
        expect(
            broken.num_calls == 1, "engine.observer_failure", f"it was called {broken.num_calls} times after it failed"
        )
        expect("_Broken" in caplog.text, "engine.observer_failure", "no warning names the observer")
        told, steps = len(good.steps), harness.stats.num_steps
        expect(told == steps, "engine.observer_failure", f"another observer was told {told} of {steps} steps")
        expect(len(harness.request(name).output_token_ids) == 4, "engine.observer_failure", "the request lost tokens")

    # Helpers

    def _two(self) -> tuple[EngineHarness, list[str]]:
        """Two requests that have begun to decode."""
        harness = self.load().harness(_SMALL)
        names = [harness.add(range(start, start + 5), max_tokens=8) for start in (0, 100)]
        for _ in range(3):
            harness.step()
        return harness, names

    def _settle(self, harness: EngineHarness) -> None:
        """Let what is in flight land."""
        for _ in range(10):
            if not harness.executor.worker.in_flight:
                return
            harness.step()
            expect(not harness.last_outputs, "engine.pause_keep", "a step was started while paused")
        raise ContractViolation("engine.lands_all", "steps in flight do not land while paused")

    def _step_to_the_failure(self, harness: EngineHarness) -> Callable[[], object]:
        return lambda: [harness.core.step() for _ in range(10)]

    def _dies(self, call: Callable[[], object]) -> None:
        try:
            call()
        except EngineDeadError as error:
            told = "the worker is gone" in str(error)
            expect(told, "engine.dies_cleanly", f"the error does not tell the cause: {error}")
        except Exception as error:
            raise ContractViolation("engine.dies_cleanly", f"a step raised {type(error).__name__}: {error}") from error
        else:
            raise ContractViolation("engine.dies_cleanly", "a step of an engine whose worker failed raised nothing")

    def _with_observers(self, *make: Callable[[], Observer]) -> Loaded:
        descriptors = [_descriptor(f"contract_{number}", one) for number, one in enumerate(make)]
        names = ",".join(descriptor.name for descriptor in descriptors)
        return self.load(f"observers=[{names}]", descriptors=descriptors)


class _Broken(Observer):
    """Raises at the first step."""

    def __init__(self) -> None:
        self.num_calls = 0

    def on_step(self, output: SchedulerOutput, result: EngineCoreOutputs, now: float) -> None:
        self.num_calls += 1
        raise RuntimeError("a broken observer")


def _descriptor(name: str, make: Callable[[], Observer]) -> ObserverDescriptor[NoOptions]:
    def factory(options: NoOptions, context: ObserverContext) -> Observer:
        return make()

    return ObserverDescriptor(name=name, api_version=(1, 7), factory=factory)
