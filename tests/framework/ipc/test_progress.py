"""How far an engine is, as a reader in another process sees it, who may come between any two stores."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest
from tokenyard.ipc import progress as progress_module
from tokenyard.ipc.progress import EnginePhase, Progress, ProgressReading
from tokenyard.server.watchdog import stall_of

TIMEOUT = 60.0


class Wall:
    """The machine's clock, which stands still until it is moved."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def monotonic_ns(self) -> int:
        return int(self.seconds * 1e9)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    made = Wall()
    monkeypatch.setattr(progress_module, "time", made)
    return made


@pytest.fixture
def progress(wall: Wall) -> Iterator[Progress]:
    made = Progress()
    yield made
    made.close()


class Stores:
    """Keeps what the memory holds after each store."""

    def __init__(self, progress: Progress) -> None:
        self._fields = progress._fields
        self.states = [self._fields.tolist()]

    def __getitem__(self, index: int) -> int:
        return int(self._fields[index])

    def __setitem__(self, index: int, value: int) -> None:
        self._fields[index] = value
        self.states.append(self._fields.tolist())

    def tolist(self) -> list[int]:
        values: list[int] = self._fields.tolist()
        return values


def readings(progress: Progress, write: Callable[[], None]) -> list[ProgressReading]:
    """All that a reader can see while this is written: each field after the one before it, at any moments."""
    stores = Stores(progress)
    fields, progress._fields = progress._fields, stores  # type: ignore[assignment]
    write()
    found = []
    for moments in itertools.combinations_with_replacement(range(len(stores.states)), len(stores.states[0])):
        values = [stores.states[moment][field] for field, moment in enumerate(moments)]
        reader = Progress()
        for field, value in enumerate(values):
            reader._fields[field] = value
        found.append(reader.read())
        reader.close()
    progress._fields = fields
    return found


def look_in_vain(progress: Progress, num_unfinished: int) -> None:
    """What a step loop writes that wakes up and finds nothing that it could do."""
    progress.begin_step(num_unfinished)
    progress.enter(EnginePhase.IDLE)


def is_stall(reading: ProgressReading) -> bool:
    return stall_of(reading, TIMEOUT) is not None


def test_looking_again_in_vain_is_no_movement(progress: Progress, wall: Wall) -> None:
    progress.enter(EnginePhase.IDLE)
    wall.seconds += 500.0
    for _ in range(10):
        look_in_vain(progress, 1)
        wall.seconds += 0.5
    assert progress.read() == (0, EnginePhase.IDLE, 5.0, 1)
    wall.seconds += TIMEOUT
    assert all(map(is_stall, readings(progress, lambda: look_in_vain(progress, 1))))


def test_a_step_that_ends_an_empty_engine_and_one_that_is_held_are_movements(progress: Progress, wall: Wall) -> None:
    look_in_vain(progress, 2)
    wall.seconds += 100.0
    progress.begin_step(2)
    progress.end_step(1)
    assert progress.read().seconds == 0.0
    progress.enter(EnginePhase.IDLE)
    for phase, num_unfinished in ((EnginePhase.IDLE, 0), (EnginePhase.HELD, 1)):
        wall.seconds += 100.0
        assert progress.read().seconds == 100.0
        progress.begin_step(num_unfinished)
        progress.enter(phase)
        assert progress.read().seconds == 0.0


@pytest.mark.parametrize("phase", [EnginePhase.IDLE, EnginePhase.HELD])
def test_work_that_comes_after_a_long_pause_is_never_seen_as_a_stall(
    progress: Progress, wall: Wall, phase: EnginePhase
) -> None:
    progress.set_unfinished(int(phase is EnginePhase.HELD))
    progress.enter(phase)
    wall.seconds += 10 * TIMEOUT

    def arrive() -> None:
        progress.begin_step(3)
        progress.end_step(3)
        progress.enter(EnginePhase.IDLE)

    assert not any(map(is_stall, readings(progress, arrive)))


def test_a_first_step_that_was_long_is_no_stall_at_its_end(progress: Progress, wall: Wall) -> None:
    progress.begin_step(1)
    wall.seconds += 4 * TIMEOUT
    found = readings(progress, lambda: progress.end_step(1))
    assert all(stall_of(reading, TIMEOUT, may_compile=True) is None for reading in found)
