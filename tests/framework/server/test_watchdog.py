"""An engine that stands still is noticed, told of, and in the end killed; one that is only slow is let alone."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from chat_calls import installed
from http_server import DEADLINE, ThreadServer, running_server, server_process, wait_for
from hypothesis import given
from hypothesis import strategies as st
from tokenyard import AsyncLLM, PolicyDescriptor, SamplingParams, SchedulerDescriptor
from tokenyard.errors import EngineDeadError
from tokenyard.interfaces import AdmitDecision, RequestView, SchedulerView, SchedulingPolicy
from tokenyard.ipc.progress import EnginePhase, ProgressReading
from tokenyard.ipc.stacks import save_stacks
from tokenyard.launch.overrides import quote_text
from tokenyard.scheduler.batch import BatchScheduler
from tokenyard.scheduler_output import SchedulerOutput
from tokenyard.server.watchdog import FIRST_STEP_GRACE, Watchdog, stall_of
from tokenyard.testing import catalogue_with

STEPPING, IDLE = EnginePhase.STEPPING, EnginePhase.IDLE
PACKAGES = Path(__file__).resolve().parents[2] / "fixtures" / "packages"


class FakeEngine:
    """An engine at a point that the test sets."""

    def __init__(self) -> None:
        self.reading = ProgressReading(5, STEPPING, 0.0, 1)
        self.killed: list[str] = []
        self.may_dump = threading.Event()
        self.may_dump.set()

    def progress(self) -> ProgressReading:
        return self.reading

    def dump_stacks(self, path: Path | None = None) -> str:
        self.may_dump.wait(DEADLINE)
        if path is not None:
            save_stacks("the stacks", path)
        return "the stacks"

    def kill(self, cause: str) -> None:
        self.killed.append(cause)

    def stand_still(self, seconds: float) -> None:
        self.reading = self.reading._replace(seconds=seconds)


def look(watchdog: Watchdog, engine: FakeEngine) -> bool:
    """Once, with the stacks that are written for it."""
    is_stalled = watchdog.look(engine)
    if watchdog._writer is not None:
        watchdog._writer.join(DEADLINE)
    return is_stalled


def test_the_ladder_warns_then_dumps_then_kills(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """2.3 #7: at once, twice and three times the timeout."""
    watchdog, engine = Watchdog(10.0, folder=tmp_path, now=lambda: 77.0), FakeEngine()
    with caplog.at_level(logging.WARNING):
        assert not look(watchdog, engine)
        engine.stand_still(10.5)
        assert look(watchdog, engine)
        (warning,) = caplog.messages
        assert "has not moved for 10.5 s; it runs step 5" in warning
        assert "the stacks" in warning
        assert look(watchdog, engine)
        assert len(caplog.messages) == 1
        engine.stand_still(20.5)
        assert look(watchdog, engine)
        (dump,) = tmp_path.iterdir()
        assert str(dump) in caplog.messages[1]
        assert "the stacks" in dump.read_text()
        assert dump.stat().st_mode & 0o777 == 0o600
        assert not engine.killed
        engine.stand_still(30.5)
        assert look(watchdog, engine)
        (cause,) = engine.killed
        assert "has not moved for 30.5 s" in cause
        assert str(dump) in cause


def test_one_that_moves_again_starts_at_the_bottom(caplog: pytest.LogCaptureFixture) -> None:
    watchdog, engine = Watchdog(10.0), FakeEngine()
    with caplog.at_level(logging.WARNING):
        engine.stand_still(11.0)
        assert look(watchdog, engine)
        engine.stand_still(0.1)
        assert not look(watchdog, engine)
        engine.stand_still(11.0)
        assert look(watchdog, engine)
    assert ["moves again" in message for message in caplog.messages] == [False, True, False]


def test_no_rung_is_left_out_even_when_nobody_looked_for_long(tmp_path: Path) -> None:
    watchdog, engine = Watchdog(1.0, folder=tmp_path), FakeEngine()
    engine.stand_still(100.0)
    for rungs in range(3):
        assert len(engine.killed) == 0, rungs
        look(watchdog, engine)
    assert len(list(tmp_path.iterdir())) == len(engine.killed) == 1


@given(
    st.integers(1, 100),
    st.sampled_from(list(EnginePhase)),
    st.floats(0, 1000),
    st.integers(0, 3),
    st.floats(0.1, 300),
)
def test_stalled_is_who_has_work_and_takes_no_step(
    num_steps: int, phase: EnginePhase, seconds: float, num_unfinished: int, timeout: float
) -> None:
    """2.3 #8: slow but moving is not, idle is not, held back by the policy is not."""
    stall = stall_of(ProgressReading(num_steps, phase, seconds, num_unfinished), timeout, may_compile=True)
    assert (stall is not None) == (seconds >= timeout and num_unfinished > 0 and phase in (STEPPING, IDLE))


def test_a_first_step_that_compiles_has_time() -> None:
    first = ProgressReading(0, STEPPING, 60.0, 1)
    assert stall_of(first, 5.0, may_compile=True) is None
    stall = stall_of(first._replace(seconds=FIRST_STEP_GRACE + 1), 5.0, may_compile=True)
    assert stall is not None
    assert stall.seconds == pytest.approx(6.0)
    assert stall_of(first, 5.0) is not None  # on a CPU nothing compiles
    assert stall_of(first._replace(num_steps=1), 5.0, may_compile=True) is not None


def test_a_stall_is_seen_at_once_however_long_its_stacks_take(tmp_path: Path) -> None:
    """And they keep nobody from killing an engine whose stacks never come."""
    watchdog, engine = Watchdog(10.0, folder=tmp_path), FakeEngine()
    engine.may_dump.clear()
    try:
        engine.stand_still(10.5)
        assert watchdog.look(engine)
        assert watchdog._writer is not None
        assert watchdog._writer.is_alive()
        engine.stand_still(31.0)
        assert watchdog.look(engine)
        assert not engine.killed
        for seconds in (41.0, 80.0):
            engine.stand_still(seconds)
            assert watchdog.look(engine)
        assert len(engine.killed) == 1
    finally:
        engine.may_dump.set()


class Sleepy(BatchScheduler):
    """Has requests and schedules none of them, while `sleeps` is set."""

    sleeps = threading.Event()

    def schedule(self) -> SchedulerOutput | None:
        return None if self.sleeps.is_set() else super().schedule()


SLEEPY = catalogue_with(
    SchedulerDescriptor(
        name="sleepy", api_version=(1, 7), factory=lambda options, context: Sleepy(context), takes_policy=True
    )
)


class Closed(SchedulingPolicy):
    """Defers everybody for as long as `is_closed`."""

    is_closed = threading.Event()

    def admit(self, request: RequestView, view: SchedulerView) -> AdmitDecision:
        return AdmitDecision.defer("closed") if self.is_closed.is_set() else AdmitDecision.accept()

    def wake_at(self, view: SchedulerView) -> float | None:
        return view.now + 0.05


CLOSED = catalogue_with(PolicyDescriptor(name="closed", api_version=(1, 7), factory=lambda options, context: Closed()))


def test_an_engine_that_has_requests_and_takes_no_step_is_stalled_until_it_does(tiny_llama_dir: Path) -> None:
    """2.3 #7: that it wakes up to look after its workers, more often than the timeout, changes nothing."""
    with running_server(
        ("scheduler=sleepy", "server.stall_timeout=2"), model=tiny_llama_dir, catalogue=SLEEPY
    ) as running:
        Sleepy.sleeps.set()
        request = threading.Thread(target=complete, args=(running, 3))
        request.start()
        try:
            wait_for(lambda: running.get("/readyz") == (503, '{"status":"stalled"}'), "it is never said to be stalled")
        finally:
            Sleepy.sleeps.clear()
            request.join()
        wait_for(lambda: running.get("/readyz")[0] == 200, "it stays unready")


def test_an_engine_whose_requests_the_policy_holds_back_is_not_stalled(tiny_llama_dir: Path) -> None:
    """2.3 #8, also where the engine tells nothing of that."""
    overrides = ("scheduler=closed", "server.stall_timeout=0.2", "engine.log_stats=false")
    with running_server(overrides, model=tiny_llama_dir, catalogue=CLOSED) as running:
        Closed.is_closed.set()
        request = threading.Thread(target=complete, args=(running, 3))
        request.start()
        try:
            wait_for(lambda: running.llm.progress().phase is EnginePhase.HELD, "it is not held back")
            held_since = time.monotonic()
            while time.monotonic() - held_since < 1.0:
                assert running.get("/readyz")[0] == 200
        finally:
            Closed.is_closed.clear()
            request.join()


def brake(path: Path, seconds: float = 0.0) -> str:
    return f"observers=[{{name: brake, path: {quote_text(str(path))}, seconds: {seconds}}}]"


@pytest.fixture(scope="module")
def hang(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Steps hang while this file is there."""
    return tmp_path_factory.mktemp("brake") / "hang"


@pytest.fixture(scope="module")
def server(tiny_llama_dir: Path, hang: Path) -> Iterator[ThreadServer]:
    with installed("brake"):
        overrides = (brake(hang, 0.02), "server.stall_timeout=0.5")
        with running_server(overrides, model=tiny_llama_dir) as running:
            yield running


def complete(server: ThreadServer, num_tokens: int) -> None:
    answer = server.client.completions.create(
        model=server.service.model_names[0], prompt=[5, 6], max_tokens=num_tokens, extra_body={"ignore_eos": True}
    )
    assert answer.choices[0].finish_reason == "length"


def test_an_engine_that_hangs_is_not_ready_and_one_that_moves_again_is(
    server: ThreadServer, hang: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """2.3 #7, PRC-01: 503 after the configured timeout, with the stacks in the log."""
    complete(server, 2)
    assert server.get("/readyz")[0] == 200
    hang.touch()
    request = threading.Thread(target=complete, args=(server, 3))
    try:
        with caplog.at_level(logging.WARNING):
            request.start()
            wait_for(lambda: server.get("/readyz") == (503, '{"status":"stalled"}'), "it is never said to be stalled")
            assert server.get("/health")[0] == 503
            assert server.get("/livez")[0] == 200
            wait_for(lambda: any("on_step" in message for message in caplog.messages), "no stacks in the log")
    finally:
        hang.unlink()
        request.join()
    wait_for(lambda: server.get("/readyz")[0] == 200, "it stays unready")


def test_slow_steps_and_idle_times_are_no_stalls(server: ThreadServer) -> None:
    """2.3 #8: the request takes several times the timeout, and no step as long as it."""
    statuses: set[int] = set()
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.02):
            statuses.add(server.get("/readyz")[0])

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        complete(server, 60)
    finally:
        is_over.set()
        watcher.join()
    assert statuses == {200}


def test_killing_an_engine_in_a_thread_tells_its_streams_and_waits_for_nothing(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    """A thread cannot be ended: it is left behind, and ends with its step."""
    hang = tmp_path / "hang"
    overrides = [f"model.name={tiny_llama_dir}", "engine.process=in", "kv_cache.num_blocks=64", brake(hang)]

    async def run(llm: AsyncLLM) -> None:
        stream = llm.generate({"prompt_token_ids": [5, 6, 7]}, SamplingParams(max_tokens=50, ignore_eos=True))
        await anext(stream)
        hang.touch()
        step = llm.progress().num_steps
        while llm.progress().seconds < 0.2:  # until one hangs
            await asyncio.sleep(0.005)
        assert llm.progress().num_steps >= step
        assert llm.progress().is_busy
        assert "on_step" in llm.dump_stacks()
        llm.kill("it hangs")
        with pytest.raises(EngineDeadError, match="it hangs"):
            [_ async for _ in stream]
        with pytest.raises(EngineDeadError):
            await llm.get_metrics()
        llm.shutdown()

    before = _engine_threads()
    with installed("brake"):
        llm = AsyncLLM.from_config(overrides)
        try:
            asyncio.run(run(llm))
        finally:
            hang.unlink()
        wait_for(lambda: _engine_threads() <= before, "the thread outlives its step")


def _engine_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name == "tokenyard-engine"}


@pytest.mark.slow
def test_the_last_rung_kills_the_engines_process_and_it_is_started_again(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """2.3 #7: warned, dumped, killed, restarted; stacks of the engine's process are in the log and in a file."""
    hang = tmp_path / "hang"
    arguments = [
        str(tiny_llama_dir),
        brake(hang),
        "server.stall_timeout=0.7",
        "server.restart_engine=true",
        "engine.process=own",
        "kv_cache.num_blocks=64",
        "model.dtype=float32",
    ]
    environment = {"PYTHONPATH": str(PACKAGES / "brake"), "TMPDIR": str(tmp_path)}
    with server_process(arguments, environment=environment) as server:
        client = server.client()
        client.completions.create(model=str(tiny_llama_dir), prompt=[5, 6], max_tokens=2)
        hang.touch()
        with pytest.raises(openai.APIError):
            client.completions.create(model=str(tiny_llama_dir), prompt=[5, 6], max_tokens=2)
        hang.unlink()
        assert "it is killed" in server.log
        assert "on_step" in server.log
        (dump,) = tmp_path.glob("tokenyard-stall-*.txt")
        assert "on_step" in dump.read_text()
        wait_for(lambda: server.get("/readyz")[0] == 200, "the engine is not started again")
        answer = client.completions.create(model=str(tiny_llama_dir), prompt=[5, 6], max_tokens=2)
        assert answer.usage is not None
        assert 'finished_reason="error"' in server.get("/metrics")[1]
