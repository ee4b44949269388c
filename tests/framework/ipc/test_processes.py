from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tokenyard.errors import UserError
from tokenyard.ipc.processes import ChildProcess, has_ended
from tokenyard.ipc.progress import EnginePhase, Progress
from tokenyard.ipc.stacks import Stacks

LIVENESS = 30.0  # seconds: ten times what it takes, and more


def wait_for(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + LIVENESS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    """Also false for a zombie, which somebody else has to reap."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except OSError:
        return False


@pytest.fixture
def start() -> Iterator[Callable[..., ChildProcess]]:
    """Starts `odd_child` with arguments, and waits until it is ready."""
    children: list[ChildProcess] = []

    def make(*arguments: str, **options: object) -> ChildProcess:
        child = ChildProcess("odd_child", "odd", arguments=arguments, **options)  # type: ignore[arg-type]
        children.append(child)
        wait_for(lambda: child.last_lines() or child.end, "the child says nothing")
        return child

    yield make
    for child in children:
        child.stop(0)


def test_a_child_ends_when_it_is_asked_to(start: Callable[..., ChildProcess]) -> None:
    child = start("wait")
    assert child.is_alive()
    child.stop(LIVENESS)
    assert child.end is not None
    assert (child.end.exit_code, child.end.signal) == (0, None)
    assert str(child.end) == "ended with exit code 0"
    child.stop()
    child.kill()


def test_a_child_that_does_not_end_is_killed(start: Callable[..., ChildProcess]) -> None:
    child = start("deaf")
    child.stop(0.1)
    assert child.end is not None
    assert (child.end.exit_code, child.end.signal) == (None, "SIGKILL")
    assert str(child.end) == "was killed by SIGKILL"
    assert not is_running(child.pid)


@pytest.mark.parametrize(
    ("arguments", "code", "signal_name", "last"),
    [
        (["crash"], 1, None, "RuntimeError: it went wrong here"),
        (["exit", "7"], 7, None, "last words"),
        (["segfault"], None, "SIGSEGV", "in <module>"),
    ],
)
def test_how_a_child_ended_and_what_it_said_last_is_kept(
    start: Callable[..., ChildProcess], arguments: list[str], code: int | None, signal_name: str | None, last: str
) -> None:
    child = start(*arguments)
    end = child.wait(LIVENESS)
    assert end is not None
    assert (end.exit_code, end.signal) == (code, signal_name)
    assert last in end.last_log_lines[-1]


def test_its_death_is_noticed_by_the_sentinel(start: Callable[..., ChildProcess]) -> None:
    dead, alive = start("deaf"), start("deaf")
    assert has_ended([dead.sentinel, alive.sentinel]) == []
    os.kill(dead.pid, signal.SIGKILL)
    assert has_ended([dead.sentinel, alive.sentinel], LIVENESS) == [dead.sentinel]


def test_what_it_says_goes_on_to_stderr_and_stdout_stays_ours(capfd: pytest.CaptureFixture[str]) -> None:
    child = ChildProcess("odd_child", "odd", arguments=["exit", "0"])
    child.wait(LIVENESS)
    out, err = capfd.readouterr()
    assert out == ""
    assert err.split("\n") == ["ready exit", "last words"]


def test_a_ctrl_c_and_a_sigterm_are_left_to_the_parent(start: Callable[..., ChildProcess]) -> None:
    child = start("wait")
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        os.kill(child.pid, number)
    child.stop(LIVENESS)
    assert child.end is not None
    assert child.end.exit_code == 0


def test_a_child_outlives_the_thread_that_asked_for_it() -> None:
    """The kernel ends a child with the thread that started it."""
    children: list[ChildProcess] = []
    thread = threading.Thread(target=lambda: children.append(ChildProcess("odd_child", "odd", arguments=["wait"])))
    thread.start()
    thread.join()
    (child,) = children
    wait_for(child.last_lines, "the child says nothing")
    assert child.wait(0.2) is None
    child.stop(LIVENESS)
    assert child.end is not None
    assert child.end.exit_code == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize(("task", "count"), [("parent", 2), ("deaf", 1)])
def test_2_3_3_children_and_their_children_end_with_their_parent(
    number: int, task: str, count: int, tmp_path: Path
) -> None:
    """Also one that does not care for the end of its stdin."""
    script = tmp_path / "parent.py"
    helpers = Path(__file__).resolve().parents[2] / "helpers"
    script.write_text(
        f"import sys, time\nsys.path.insert(0, {str(helpers)!r})\n"
        "from tokenyard.ipc.processes import ChildProcess\n"
        f"child = ChildProcess('odd_child', 'odd', arguments=[{task!r}])\n"
        f"while len(child.last_lines()) < {2 * count - 1}: time.sleep(0.01)\n"
        "print(child.pid, *(line.split()[1] for line in child.last_lines()[1:2]), flush=True)\ntime.sleep(600)\n"
    )
    parent = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == count
    assert all(map(is_running, pids))
    os.kill(parent.pid, number)
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not any(map(is_running, pids)), f"still running: {pids}")


def test_a_program_that_does_not_start_is_a_user_error(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = threading.active_count()
    for executable, said in (("", "does not know its own executable"), ("/nowhere/python", "No such file")):
        monkeypatch.setattr(sys, "executable", executable)
        with pytest.raises(UserError, match=f"the process 'odd' does not start: .*{said}"):
            ChildProcess("odd_child", "odd")
    wait_for(lambda: threading.active_count() == threads, "a thread is left")


def test_settings_of_the_interpreter_go_on(start: Callable[..., ChildProcess], monkeypatch: pytest.MonkeyPatch) -> None:
    """PLG-04: what was set in the parent holds in the child."""
    monkeypatch.setenv("ODD_SETTING", "7")
    child = start("tell", environment={"ODD_OTHER": "8"})
    wait_for(lambda: len(child.last_lines()) > 1, "the child does not tell")
    path, setting, other = child.last_lines()[1].split("|")
    assert path == ":".join(os.path.abspath(entry) for entry in sys.path)
    assert (setting, other) == ("7", "8")


def test_stacks_of_a_child_and_its_children_can_be_had_whatever_they_do() -> None:
    stacks = Stacks()
    child = ChildProcess("odd_child", "kid", arguments=["parent"], stacks=stacks.descriptor)
    wait_for(lambda: len(child.last_lines()) > 2, "the grandchild says nothing")
    text = stacks.dump()
    assert text.count("== ") == 2
    kid, grandchild = text.split("== ")[1:]
    assert kid.startswith(f"kid (process {child.pid})")
    assert "odd_child.py" in kid
    assert grandchild.startswith("grandchild (process ")
    assert "odd_child.py" in grandchild
    child.stop(LIVENESS)
    assert stacks.dump() == ""
    stacks.close()
    assert stacks.dump() == ""


def test_progress_is_seen_by_who_shares_its_memory() -> None:
    ours = Progress()
    theirs = Progress(ours.descriptor)
    assert ours.read()[:2] == (0, EnginePhase.STARTING)
    theirs.enter(EnginePhase.IDLE)
    assert ours.read().phase is EnginePhase.IDLE
    theirs.begin_step(3)
    reading = ours.read()
    assert (reading.num_steps, reading.phase, reading.num_unfinished) == (0, EnginePhase.STEPPING, 3)
    assert 0 <= reading.seconds < LIVENESS
    assert reading.is_busy
    theirs.end_step(0)
    assert ours.read().num_steps == 1
    assert not ours.read().is_busy
    ours.close()
    assert ours.read().num_steps == 1
