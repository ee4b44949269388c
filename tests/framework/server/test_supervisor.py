"""The supervisor: what a server does when its engine dies, and how often."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import TypeVar

import pytest
from tokenyard.catalogue import Catalogue
from tokenyard.config import EngineConfig, ServerConfig
from tokenyard.errors import EngineDeadError, ModelLoadError
from tokenyard.server import supervisor as module
from tokenyard.server.health import unready_reason
from tokenyard.server.run import _Running, _Starter
from tokenyard.server.service import EngineState, Service
from tokenyard.server.supervisor import Supervisor

T = TypeVar("T")

DEADLINE = 30.0  # seconds: liveness only


@dataclass(eq=False)
class FakeEngine:
    """As much of an AsyncLLM as a supervisor knows."""

    number: int
    is_shut_down: bool = False
    callbacks: list[Callable[[EngineDeadError], None]] = field(default_factory=list)

    def on_death(self, callback: Callable[[EngineDeadError], None]) -> None:
        self.callbacks.append(callback)

    def shutdown(self) -> None:
        self.is_shut_down = True

    def die(self) -> None:
        for callback in self.callbacks:
            callback(EngineDeadError(f"engine {self.number} died"))


class FakeObservation:
    def attach(self, engine: object) -> None:
        """Nothing."""


class Bench:
    """A service with a supervisor, engines that die when they are told to, and a clock that is set."""

    def __init__(self, *, restart: bool, failing: frozenset[int] = frozenset()) -> None:
        self.now = 0.0
        self.engines: list[FakeEngine] = []
        self.num_starts = 0
        self._failing = failing
        config = replace(EngineConfig(), server=ServerConfig(restart_engine=restart))
        self.service = Service(config=config)
        self.service.observation = FakeObservation()  # type: ignore[assignment]
        self.supervisor = Supervisor(self.service, self._start, "fake-start", now=lambda: self.now)  # type: ignore[arg-type]

    def _start(self, on_progress: Callable[[str], None]) -> FakeEngine:
        self.num_starts += 1
        on_progress(f"phase {self.num_starts}")
        if self.num_starts in self._failing:
            raise ModelLoadError(f"start {self.num_starts} failed")
        engine = FakeEngine(self.num_starts)
        self.engines.append(engine)
        return engine

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(DEADLINE):
            while not condition():
                await asyncio.sleep(0.001)

    async def until_ready(self, number: int) -> FakeEngine:
        await self.until(lambda: getattr(self.service.llm, "number", None) == number)
        assert unready_reason(self.service) is None
        return self.engines[-1]


def run(main: Coroutine[object, object, T]) -> T:
    async def limited() -> T:
        return await asyncio.wait_for(main, DEADLINE)

    return asyncio.run(limited())


@pytest.fixture(autouse=True)
def no_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LAST_WORDS", 0.01)
    monkeypatch.setattr(module, "_RESTART_PAUSE", 0.001)


def test_a_dead_engine_is_told_to_probes_and_then_ends_the_server() -> None:
    async def main() -> None:
        bench = Bench(restart=False)
        bench.supervisor.begin()
        assert unready_reason(bench.service) == "starting"
        running = asyncio.create_task(bench.supervisor.run())
        engine = await bench.until_ready(1)
        engine.die()
        await bench.until(lambda: bench.service.state is EngineState.DEAD)
        assert unready_reason(bench.service) == "dead"
        with pytest.raises(EngineDeadError, match=r"is dead"):
            _ = bench.service.engine
        with pytest.raises(EngineDeadError, match="engine 1 died"):
            await running
        assert engine.is_shut_down

    run(main())


def test_answers_that_are_going_out_are_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        bench = Bench(restart=False)
        running = asyncio.create_task(bench.supervisor.run())
        engine = await bench.until_ready(1)
        bench.service.num_open = 1
        engine.die()
        await bench.until(lambda: engine.is_shut_down)
        await asyncio.sleep(0.1)
        assert not running.done()
        bench.service.num_open = 0
        with pytest.raises(EngineDeadError):
            await running

    run(main())


def test_a_dead_engine_is_started_again_three_times_in_ten_minutes() -> None:
    async def main() -> None:
        bench = Bench(restart=True)
        running = asyncio.create_task(bench.supervisor.run())
        for number in (1, 2, 3):
            (await bench.until_ready(number)).die()
            bench.now += 100
        engine = await bench.until_ready(4)
        engine.die()
        with pytest.raises(EngineDeadError, match="engine 4 died"):
            await running
        assert all(engine.is_shut_down for engine in bench.engines)

    run(main())


def test_after_ten_minutes_it_may_die_again() -> None:
    async def main() -> None:
        bench = Bench(restart=True)
        running = asyncio.create_task(bench.supervisor.run())
        for number in range(1, 8):
            (await bench.until_ready(number)).die()
            bench.now += 201
        await bench.until_ready(8)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        await bench.supervisor.close()
        assert bench.engines[-1].is_shut_down

    run(main())


def test_a_first_start_that_fails_is_not_tried_again() -> None:
    async def main() -> None:
        bench = Bench(restart=True, failing=frozenset({1}))
        with pytest.raises(ModelLoadError, match="start 1 failed"):
            await bench.supervisor.run()
        assert bench.num_starts == 1

    run(main())


def test_a_start_after_a_death_is_tried_again_within_the_same_bound() -> None:
    async def main() -> None:
        bench = Bench(restart=True, failing=frozenset({2, 3, 4}))
        running = asyncio.create_task(bench.supervisor.run())
        (await bench.until_ready(1)).die()
        with pytest.raises(ModelLoadError, match="start 4 failed"):
            await running
        assert bench.num_starts == 4

    run(main())


def test_an_engine_that_was_dead_before_it_was_watched_is_noticed() -> None:
    async def main() -> None:
        bench = Bench(restart=False)
        start = bench._start

        def start_dead(on_progress: Callable[[str], None]) -> FakeEngine:
            engine = start(on_progress)
            engine.on_death = lambda callback: callback(EngineDeadError("dead on arrival"))  # type: ignore[method-assign]
            return engine

        bench.supervisor._start = start_dead  # type: ignore[assignment]
        with pytest.raises(EngineDeadError, match="dead on arrival"):
            await bench.supervisor.run()

    run(main())


def test_a_signal_while_a_death_is_told_does_not_hide_the_death(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LAST_WORDS", DEADLINE)

    async def main() -> None:
        bench = Bench(restart=False)
        running = asyncio.create_task(bench.supervisor.run())
        engine = await bench.until_ready(1)
        engine.die()
        await bench.until(lambda: engine.is_shut_down)
        running.cancel()
        with pytest.raises(EngineDeadError, match="engine 1 died"):
            await running

    run(main())


def test_an_engine_that_dies_after_the_event_loop_tells_nobody_and_fails_in_nothing() -> None:
    async def main() -> FakeEngine:
        bench = Bench(restart=False)
        running = asyncio.create_task(bench.supervisor.run())
        engine = await bench.until_ready(1)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return engine

    run(main()).die()


@pytest.mark.parametrize("is_dead", [False, True])
def test_an_engine_that_cannot_be_stopped_is_told_and_hides_no_death(
    monkeypatch: pytest.MonkeyPatch, is_dead: bool
) -> None:
    class FailingSupervisor(Supervisor):
        def begin(self) -> None:
            """There is no engine."""

        async def run(self) -> None:
            if is_dead:
                raise EngineDeadError("it died")

        async def close(self) -> None:
            raise RuntimeError("it does not stop")

    monkeypatch.setattr("tokenyard.server.run.Supervisor", FailingSupervisor)
    service = Service(config=EngineConfig(server=ServerConfig(port=0)))
    starter = _Starter(service, Catalogue())
    with pytest.raises(EngineDeadError if is_dead else RuntimeError, match="it d"):
        run(_Running(service, starter, ()).run())
