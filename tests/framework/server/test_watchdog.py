"""An engine that stands still is noticed, told of, and in the end killed; one that is only slow is let alone."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from chat_calls import installed
from http_server import ThreadServer, running_server, server_process, wait_for
from hypothesis import given
from hypothesis import strategies as st
from tokenyard import AsyncLLM, SamplingParams
from tokenyard.errors import EngineDeadError
from tokenyard.ipc.progress import EnginePhase, ProgressReading
from tokenyard.launch.overrides import quote_text
from tokenyard.server.watchdog import FIRST_STEP_GRACE, Watchdog, stall_of

STEPPING, IDLE = EnginePhase.STEPPING, EnginePhase.IDLE
PACKAGES = Path(__file__).resolve().parents[2] / "fixtures" / "packages"


class FakeEngine:
    """An engine at a point that the test sets."""

    def __init__(self) -> None:
        self.reading = ProgressReading(5, STEPPING, 0.0, 1)
        self.killed: list[str] = []

    def progress(self) -> ProgressReading:
        return self.reading

    def dump_stacks(self) -> str:
        return "the stacks"

    def kill(self, cause: str) -> None:
        self.killed.append(cause)

    def stand_still(self, seconds: float) -> None:
        self.reading = self.reading._replace(seconds=seconds)


def look(watchdog: Watchdog, engine: FakeEngine) -> bool:
    return asyncio.run(watchdog.look(engine, is_held_back=False))


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
    st.booleans(),
)
def test_stalled_is_who_has_work_and_takes_no_step(
    num_steps: int, phase: EnginePhase, seconds: float, num_unfinished: int, timeout: float, is_held_back: bool
) -> None:
    """2.3 #8: slow but moving is not, idle is not, held back by the policy is not."""
    stall = stall_of(ProgressReading(num_steps, phase, seconds, num_unfinished), timeout, is_held_back=is_held_back)
    if seconds < timeout or not num_unfinished or phase in (EnginePhase.STARTING, EnginePhase.ENDED):
        assert stall is None
    elif phase is STEPPING:
        assert stall is not None
    else:
        assert (stall is None) == is_held_back


def test_a_first_step_that_compiles_has_time() -> None:
    first = ProgressReading(0, STEPPING, 60.0, 1)
    assert stall_of(first, 5.0, is_held_back=False) is None
    stall = stall_of(first._replace(seconds=FIRST_STEP_GRACE + 1), 5.0, is_held_back=False)
    assert stall is not None
    assert stall.seconds == pytest.approx(6.0)


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
