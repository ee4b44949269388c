"""EngineThread beside an engine that its test scripts: what is told of progress, and of its end."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import pytest
from http_server import wait_for
from loop_parts import make_rig, request
from tokenyard.clock import MonotonicClock
from tokenyard.engine import driver
from tokenyard.engine.driver import waiting_phase
from tokenyard.engine.engine_thread import EngineThread
from tokenyard.engine.loop import NOTHING_RAN
from tokenyard.engine_outputs import EngineCoreOutputs, SchedulerStats
from tokenyard.errors import EngineDeadError
from tokenyard.interfaces import PauseMode
from tokenyard.interfaces.engine_core import EngineCore
from tokenyard.ipc.progress import EnginePhase
from tokenyard.request import EngineCoreRequest, FinishReason

STATS = SchedulerStats(
    num_running=0,
    num_waiting=1,
    num_steps=0,
    num_preemptions=0,
    num_prompt_tokens=0,
    num_generation_tokens=0,
    prefix_cache_queries=0,
    prefix_cache_hits=0,
    num_free_blocks=1,
    num_total_blocks=1,
)


class Core:
    """Has a request, and does nothing about it."""

    is_paused = False

    def __init__(self) -> None:
        self.num_looks = 0
        self.runs = False  # whether steps do

    def add_request(self, added: EngineCoreRequest) -> None:
        pass

    def has_requests(self) -> bool:
        return True

    def step(self) -> EngineCoreOutputs:
        self.num_looks += 1
        return replace(NOTHING_RAN, did_run=self.runs)

    def wake_at(self) -> float | None:
        return None

    def stats(self) -> SchedulerStats:
        return STATS

    def check_health(self) -> None:
        pass

    def finish_requests(self, request_ids: Sequence[str], reason: FinishReason) -> Sequence[str]:
        return ()

    def shutdown(self) -> None:
        pass


@dataclass(frozen=True)
class Engine:
    fake: Core
    clock: MonotonicClock

    @property
    def core(self) -> EngineCore:
        return cast("EngineCore", self.fake)


class Listener:
    """Notes the threads in which it is called, and can be held up."""

    def __init__(self) -> None:
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.is_told = threading.Event()
        self.num_inside = 0
        self.most_inside = 0
        self.told: list[str] = []
        self.failure: BaseException | None = None

    def deliver(self, outputs: EngineCoreOutputs) -> Sequence[str]:
        self.num_inside += 1
        self.is_told.set()
        self.goes_on.wait(60)
        self.told.append("deliver")
        self.num_inside -= 1
        return ()

    def refuse(self, request_ids: Sequence[str], error: Exception) -> None:
        self.told.append("refuse")

    def end(self, failure: BaseException | None) -> None:
        self.most_inside = max(self.most_inside, self.num_inside + 1)
        self.failure = failure
        self.told.append("end")


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def core() -> Core:
    return Core()


@pytest.fixture
def thread(core: Core, listener: Listener) -> Iterator[EngineThread[Engine]]:
    made = EngineThread(lambda: Engine(core, MonotonicClock()))
    made.begin(listener)
    yield made
    made.stop()


def test_an_engine_that_wakes_up_in_vain_shows_since_when_it_has_not_moved(
    thread: EngineThread[Engine], core: Core, monkeypatch: pytest.MonkeyPatch
) -> None:
    """2.3 #7: looking after its workers is not progress."""
    monkeypatch.setattr(driver, "_HEALTH_INTERVAL", 0.01)
    thread.add([request("a")])
    wait_for(lambda: thread.progress().is_busy, "the request does not arrive")
    first, looks = thread.progress(), core.num_looks
    wait_for(lambda: core.num_looks >= looks + 20, "it does not look again")
    last = thread.progress()
    assert last.seconds > first.seconds
    assert last.seconds > 20 * 0.01
    assert last.num_steps == 0


def test_killing_tells_of_the_end_after_what_is_being_told_and_nothing_comes_after_that(
    thread: EngineThread[Engine], core: Core, listener: Listener, tmp_path: Path
) -> None:
    core.runs = True
    listener.is_told.clear()
    listener.goes_on.clear()
    thread.add([request("a")])
    assert listener.is_told.wait(60)
    assert "MainThread" in thread.dump_stacks(tmp_path / "stacks") or "Thread" in (tmp_path / "stacks").read_text()
    killer = threading.Thread(target=thread.kill, args=("it hangs",))
    killer.start()
    wait_for(lambda: thread._is_killed, "it is not killed")
    assert "end" not in listener.told
    listener.goes_on.set()
    killer.join(60)
    thread._thread.join(60)
    assert listener.told[-1] == "end"
    assert listener.most_inside == 1
    assert isinstance(listener.failure, EngineDeadError)
    assert listener.failure.dump_path == tmp_path / "stacks"


def test_a_paused_engine_is_held_and_an_empty_one_idle() -> None:
    rig = make_rig("sync")
    assert waiting_phase(rig.engine) is EnginePhase.IDLE
    rig.engine.add_request(request("a"))
    rig.engine.pause(PauseMode.KEEP)
    rig.step()
    assert waiting_phase(rig.engine) is EnginePhase.HELD
    rig.engine.resume()
    assert waiting_phase(rig.engine) is EnginePhase.IDLE
