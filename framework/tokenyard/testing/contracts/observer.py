"""ObserverContract: what an observer must keep."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tokenyard.testing.contracts.base import Contract, Loaded, Result, Shape, check_equal, expect, no_errors
from tokenyard.testing.contracts.recorders import Recorder
from tokenyard.testing.contracts.traces import Operation, Player, shapes, traces
from tokenyard.testing.errors import ContractViolation


class ObserverContract(Contract):
    """Set `overrides = ["observers=[NAME]"]`, or with options `["observers=[{name: NAME, OPTION: VALUE}]"]`."""

    _kind = "observer"
    _choice = "observers=[NAME]"

    def test_it_changes_nothing(self) -> None:
        """`observer.changes_nothing`: steps, tokens and ends are those of an engine without it."""
        self._compare()

    def test_it_changes_nothing_with_steps_in_flight(self) -> None:
        """`observer.changes_nothing`: the same under a loop with several steps in flight."""
        self._compare("engine=overlap")

    def test_it_needs_no_stats(self) -> None:
        """`observer.without_stats`: with `engine.log_stats=false` a step's outputs have no stats."""
        self._compare("engine.log_stats=false")

    def test_it_never_raises(self) -> None:
        """`observer.never_raises`: an observer that raises is switched off; a step may also end nothing, or all."""
        loaded = self.load()
        recorder = Recorder()
        harness = loaded.harness(Shape(), decorate=recorder.decorate)
        names = [harness.add([1, 2, 3], max_tokens=1), harness.add(range(30), max_tokens=9)]
        harness.run(tokens={names[1]: [50256]})
        harness.core.shutdown()
        self._raise_first(recorder)

    def test_it_can_stop_before_the_first_step(self) -> None:
        """`observer.shutdown`: an engine may be shut down before it has run a step."""
        recorder = Recorder()
        self.load().harness(Shape(), decorate=recorder.decorate).core.shutdown()
        self._raise_first(recorder)
        counts = [observer.num_shutdowns for observer in recorder.observers]
        expect(all(count == 1 for count in counts), "observer.shutdown", f"on_shutdown was called {counts} times")

    def _compare(self, *overrides: str) -> None:
        loaded, plain = self.load(*overrides), self.load(*overrides, "observers=[]")

        def check(trace: Sequence[Operation], shape: Shape) -> None:
            recorder = Recorder()
            observed = self._play(loaded, trace, shape, recorder)
            expected = self._play(plain, trace, shape, Recorder())
            check_equal("observer.changes_nothing", observed[0], expected[0], "with and without it")
            expect(observed[1] == expected[1], "observer.changes_nothing", "the steps are others than without it")

        self.for_all(check, traces(), shapes())

    def _play(
        self, loaded: Loaded, trace: Sequence[Operation], shape: Shape, recorder: Recorder
    ) -> tuple[Mapping[str, Result], list[dict[str, int]]]:
        player = Player(loaded.harness(shape, decorate=recorder.decorate))
        try:
            with no_errors("observer.never_raises"):
                player.play(trace)
                results = player.finish()
        except ContractViolation:
            self._raise_first(recorder)  # what the observer did explains what came of it
            raise
        player.harness.core.shutdown()
        self._raise_first(recorder)
        steps = list(range(player.harness.stats.num_steps))
        for observer in recorder.observers:
            expect(observer.steps == steps, "observer.told_once", f"of steps {steps} it was told {observer.steps}")
        return results, player.schedule

    def _raise_first(self, recorder: Recorder) -> None:
        for observer in recorder.observers:
            for violation in observer.violations:
                raise violation
