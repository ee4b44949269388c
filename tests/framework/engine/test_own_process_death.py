"""Whatever ends an engine's own process, everybody who waits for it is told at once, and nothing is left."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from own_process import (
    LIVENESS,
    PACKAGE,
    children_of,
    is_running,
    letters_async_llm,
    letters_llm,
    link_of,
    nothing_left,
    probe_installed,
    process_of,
    short_folder,
    wait_for,
)
from tokenyard import AsyncLLM, RequestOutput, SamplingParams
from tokenyard.engine import process as process_module
from tokenyard.errors import EngineDeadError
from tokenyard.ipc.progress import EnginePhase

LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SLOW = "executor.step_seconds=0.05"


@pytest.fixture(scope="module", autouse=True)
def probe() -> Iterator[None]:
    with probe_installed():
        yield


@pytest.fixture(autouse=True)
def clean(tiny_llama_dir: Path) -> Iterator[None]:
    with nothing_left():
        yield


async def first_then_rest(stream: AsyncIterator[RequestOutput], started: asyncio.Event) -> RequestOutput:
    outputs: list[RequestOutput] = []
    async for output in stream:
        started.set()
        outputs.append(output)
    return outputs[-1]


def die_with_streams(llm: AsyncLLM, kill: Callable[[], None]) -> list[EngineDeadError]:
    """What three streams that run and one that comes later raise."""

    async def main() -> list[EngineDeadError]:
        events = [asyncio.Event() for _ in range(3)]
        tasks = [asyncio.create_task(first_then_rest(llm.generate("hi", LONG), event)) for event in events]
        for event in events:
            await event.wait()
        kill()
        found = list(await asyncio.gather(*tasks, return_exceptions=True))
        found += await asyncio.gather(first_then_rest(llm.generate("hi", LONG), events[0]), return_exceptions=True)
        assert all(isinstance(error, EngineDeadError) for error in found), found
        return found  # type: ignore[return-value]

    return asyncio.run(asyncio.wait_for(main(), 60))


def test_2_3_2_prc_02_a_killed_engine_ends_every_stream_and_every_later_call_with_the_signals_name(
    tiny_llama_dir: Path,
) -> None:
    llm = letters_async_llm(tiny_llama_dir, SLOW)
    pid = process_of(llm).pid
    errors = die_with_streams(llm, lambda: os.kill(pid, signal.SIGKILL))
    assert len({id(error) for error in errors}) == 4
    for error in errors:
        assert str(error) == "the engine's process was killed by SIGKILL; start a new one"
        assert (error.signal, error.process_exit_code) == ("SIGKILL", None)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        llm._link.stats()
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        link_of(llm).check_health()  # E6
    assert llm.progress().phase is EnginePhase.ENDED
    assert not is_running(pid)
    llm.shutdown()


def test_2_3_2_prc_02_llm_generate_raises_and_never_hangs_when_the_engine_is_killed(tiny_llama_dir: Path) -> None:
    llm = letters_llm(tiny_llama_dir, SLOW)
    process = process_of(llm)

    def kill_later() -> None:
        wait_for(lambda: process.progress.read().num_steps > 2, "the engine does not step")
        os.kill(process.pid, signal.SIGKILL)

    thread = threading.Thread(target=kill_later)
    thread.start()
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        llm.generate(["hi", "he"], LONG, use_tqdm=False)
    thread.join()
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
            llm.generate("hi", LONG, use_tqdm=False)
    with pytest.raises(EngineDeadError, match="killed by SIGKILL"):
        llm.get_metrics()
    llm.shutdown()


def test_one_that_dies_while_it_is_idle_is_noticed(tiny_llama_dir: Path) -> None:
    llm = letters_async_llm(tiny_llama_dir)
    told: list[EngineDeadError] = []
    llm.on_death(told.append)
    os.kill(process_of(llm).pid, signal.SIGSEGV)
    wait_for(lambda: told, "nobody is told")
    assert told[0].signal == "SIGSEGV"
    assert any("Segmentation fault" in line for line in told[0].last_log_lines)
    llm.shutdown()


@pytest.mark.parametrize("task", ["raise", "exit"])
def test_an_error_in_a_step_reaches_everyone_with_what_the_engine_raised(tiny_llama_dir: Path, task: str) -> None:
    llm = letters_async_llm(tiny_llama_dir, SLOW)

    async def main() -> list[object]:
        started = asyncio.Event()
        other = asyncio.create_task(first_then_rest(llm.generate("hi", LONG), started))
        await started.wait()
        doomed = first_then_rest(llm.generate("hi", LONG, scheduling={"task": task}), started)
        return await asyncio.gather(other, doomed, return_exceptions=True)

    for error in asyncio.run(asyncio.wait_for(main(), 60)):
        assert isinstance(error, EngineDeadError)
        if task == "raise":
            assert "BatchScheduler.update_from_output (PluginError: scheduling policy probe failed" in str(error)
            assert "RuntimeError: the fuse has blown" in str(error)
            assert "PluginError" in str(error.__cause__)
            assert any("RuntimeError: the fuse has blown" in line for line in error.last_log_lines)
        else:
            assert "SystemExit: 5" in str(error)
        assert error.process_exit_code == 1
    llm.shutdown()


def test_a_call_that_waits_for_an_answer_is_told_of_the_end(tiny_llama_dir: Path) -> None:
    llm = letters_async_llm(tiny_llama_dir)
    link, answer = link_of(llm), Future[None]()

    def ask() -> None:
        try:
            link.settle()
        except BaseException as error:
            answer.set_exception(error)

    os.kill(link.process.pid, signal.SIGSTOP)  # it never answers
    threading.Thread(target=ask, daemon=True).start()
    wait_for(lambda: link._calls, "nobody asks")
    os.kill(link.process.pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError, match="SIGKILL"):
        answer.result(LIVENESS)
    llm.shutdown()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_listener_that_fails_at_the_end_leaves_no_process_and_no_file(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = letters_async_llm(tiny_llama_dir)
    link = link_of(llm)

    def fail(failure: BaseException | None) -> None:
        raise RuntimeError("planted")

    monkeypatch.setattr(link._listener, "end", fail)
    os.kill(link.process.pid, signal.SIGKILL)
    wait_for(lambda: not link._thread.is_alive(), "the link does not end")
    is_closed = link.process._incoming.socket.closed
    link.process.close()  # or the end of this process would wait for it
    assert is_closed
    llm.shutdown()


def test_a_shutdown_with_requests_running_ends_every_stream(tiny_llama_dir: Path) -> None:
    llm = letters_async_llm(tiny_llama_dir, SLOW)
    for error in die_with_streams(llm, lambda: threading.Thread(target=llm.shutdown).start()):
        assert "shut down" in str(error)


def test_2_3_7_the_stacks_of_one_that_hangs_can_be_had_and_it_can_be_killed(
    tiny_llama_dir: Path, tmp_path: Path
) -> None:
    llm = letters_async_llm(tiny_llama_dir, "executor.step_seconds=600")
    process = process_of(llm)

    async def main() -> object:
        task = asyncio.create_task(first_then_rest(llm.generate("hi", LONG), asyncio.Event()))
        while process.progress.read().phase is not EnginePhase.STEPPING or not process.progress.read().num_unfinished:
            await asyncio.sleep(0.01)
        assert process.progress.read().is_busy
        dump = await asyncio.to_thread(llm.dump_stacks, tmp_path / "stacks.txt")
        assert "tokenyard_probe.py" in dump
        assert "sample_tokens" in dump
        assert (tmp_path / "stacks.txt").read_text() == dump
        assert "== engine" in dump
        assert "test_own_process_death.py" in dump  # this process's own
        llm.kill("the engine made no step for 60 s")
        (error,) = await asyncio.gather(task, return_exceptions=True)
        return error

    error = asyncio.run(asyncio.wait_for(main(), 60))
    assert isinstance(error, EngineDeadError)
    assert str(error) == "the engine made no step for 60 s"
    assert (error.signal, error.dump_path) == ("SIGKILL", tmp_path / "stacks.txt")
    llm.shutdown()


def test_a_call_that_waits_is_told_of_the_death(tiny_llama_dir: Path) -> None:
    llm = letters_async_llm(tiny_llama_dir, "executor.step_seconds=600")

    async def main() -> object:
        stream = asyncio.create_task(first_then_rest(llm.generate("hi", LONG), asyncio.Event()))
        while llm.progress().phase is not EnginePhase.STEPPING or not llm.progress().num_unfinished:
            await asyncio.sleep(0.01)
        call = asyncio.create_task(llm.get_metrics())
        while not link_of(llm)._calls:
            await asyncio.sleep(0.01)
        os.kill(process_of(llm).pid, signal.SIGKILL)
        return await asyncio.gather(stream, call, return_exceptions=True)

    for error in asyncio.run(asyncio.wait_for(main(), 60)):  # type: ignore[attr-defined]
        assert isinstance(error, EngineDeadError)
        assert error.signal == "SIGKILL"
    llm.shutdown()


def test_one_that_hangs_does_not_hold_up_a_shutdown_for_ever(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_module, "STOP_GRACE", 0.3)
    llm = letters_llm(tiny_llama_dir, "executor.step_seconds=600")
    process = process_of(llm)
    llm.enqueue("hi", LONG)
    wait_for(lambda: process.progress.read().num_unfinished, "the request does not arrive")
    llm.shutdown()
    assert process.end is not None
    assert process.end.signal == "SIGKILL"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_2_3_3_the_engine_ends_with_its_parent_however_that_ends(tiny_llama_dir: Path, number: int) -> None:
    script = (
        f"import sys, time; sys.path.insert(0, {str(PACKAGE)!r})\n"
        "from tokenyard import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny_llama_dir)!r}, overrides=['engine.process=own', 'executor=letters', "
        "'executor.step_seconds=600', 'kv_cache.num_blocks=64'])\n"
        "llm.enqueue('hi')\nprint('ready', flush=True)\ntime.sleep(600)\n"
    )
    with short_folder() as folder:
        parent = subprocess.Popen(
            [sys.executable, "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "TMPDIR": str(folder)},
        )
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"ready\n"
        children = children_of(parent.pid)
        assert children
        os.kill(parent.pid, number)
        parent.wait()
        parent.stdout.close()
        wait_for(lambda: not any(map(is_running, children)), f"still running: {children}")
