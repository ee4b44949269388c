"""The process that renders templates: its deadline, its limits, its end, and what its parent may go through."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenyard.errors import TokenyardError
from tokenyard.model.template_renderer import TemplateFailedError, TemplateRenderer

SLOW = "{% set ns = namespace(n=9) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}"

needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="no /proc")


@pytest.fixture
def renderer() -> Iterator[TemplateRenderer]:
    made = TemplateRenderer(deadline_seconds=1.0)
    yield made
    made.close()


def process_of(renderer: TemplateRenderer) -> subprocess.Popen[bytes]:
    assert renderer._process is not None
    return renderer._process._process


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stderr == ""
    return done.stdout


def test_b10_one_operation_that_never_ends_is_ended_at_the_deadline_and_the_next_chat_works(
    renderer: TemplateRenderer,
) -> None:
    renderer.render("a", {})
    stuck = process_of(renderer)
    with pytest.raises(TemplateFailedError, match="longer than 1 s"):
        renderer.render(SLOW, {})
    assert stuck.returncode is not None
    assert renderer.render("{{ x }}", {"x": "b"}) == "b"


def test_b10_many_slow_steps_are_ended_in_the_same_process(renderer: TemplateRenderer) -> None:
    renderer.render("a", {})
    before = process_of(renderer)
    slow_steps = "{% for i in range(90000) %}{% if ('x' * 100000) | upper %}{% endif %}{% endfor %}"
    with pytest.raises(TemplateFailedError, match="longer than 1 s"):
        renderer.render(slow_steps, {})
    assert process_of(renderer) is before
    assert renderer.render("b", {}) == "b"


@needs_proc
def test_b10_the_process_knows_none_of_the_parents_secrets(
    renderer: TemplateRenderer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    renderer.render("a", {})
    assert b"secret" not in Path(f"/proc/{process_of(renderer).pid}/environ").read_bytes()


@needs_proc
def test_b10_the_processes_memory_is_limited(renderer: TemplateRenderer) -> None:
    renderer.render("a", {})
    limits = Path(f"/proc/{process_of(renderer).pid}/limits").read_text().splitlines()
    (line,) = [line for line in limits if line.startswith("Max address space")]
    assert int(line.split()[3]) <= 512 * 2**20


def test_what_a_template_is_given_comes_back_unchanged(renderer: TemplateRenderer) -> None:
    values: list[Any] = ["\u2028\n\r\x00\ud800", 2**70, -1.5, True, None, {"a": ["b", {}]}, "😀"]
    for value in values:
        assert json.loads(renderer.render("{{ x | tojson }}", {"x": value})) == value


def test_a_process_that_was_killed_is_started_anew(renderer: TemplateRenderer) -> None:
    renderer.render("a", {})
    process_of(renderer).kill()
    process_of(renderer).wait()
    assert renderer.render("b", {}) == "b"


def test_a_process_that_dies_while_it_renders_is_one_error(renderer: TemplateRenderer) -> None:
    renderer.render("a", {})
    killer = threading.Timer(0.1, process_of(renderer).kill)
    killer.start()
    with pytest.raises(TemplateFailedError, match="ends the process"):
        renderer.render(SLOW, {})
    killer.join()
    assert renderer.render("b", {}) == "b"


def test_closing_ends_the_process_and_a_later_chat_starts_another(renderer: TemplateRenderer) -> None:
    renderer.close()
    assert renderer.render("a", {}) == "a"
    process = process_of(renderer)
    renderer.close()
    renderer.close()
    assert process.returncode is not None
    assert renderer.render("b", {}) == "b"


def test_a_renderer_that_nobody_holds_ends_its_process() -> None:
    renderer = TemplateRenderer()
    renderer.render("a", {})
    process = process_of(renderer)
    del renderer  # the timer of the last rendering lets go of it when its thread ends
    assert process.wait(timeout=30) is not None


@needs_proc
def test_no_file_stays_open(renderer: TemplateRenderer) -> None:
    renderer.render("a", {})
    renderer.close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        renderer.render("a", {})
        renderer.close()
    assert len(os.listdir("/proc/self/fd")) == before


def test_threads_get_their_own_answers(renderer: TemplateRenderer) -> None:
    def ask(number: int) -> bool:
        return renderer.render("{{ x }}" * (number % 7), {"x": str(number)}) == str(number) * (number % 7)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(ask, range(300)))


def test_an_interrupt_while_rendering_does_not_hand_the_answer_to_the_next_chat() -> None:
    code = """
import os, signal, threading
from tokenyard.model.template_renderer import TemplateRenderer

renderer = TemplateRenderer(5.0)
renderer.render("a", {})
threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
try:
    renderer.render("{% for i in range(90000) %}{% if ('x' * 10000) | upper %}{% endif %}{% endfor %}late", {})
except KeyboardInterrupt:
    print("interrupted", renderer.render("b", {}))
"""
    assert run_python(code).split() == ["interrupted", "b"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_both_sides_of_a_fork_can_render() -> None:
    code = """
import os
from tokenyard.model.template_renderer import TemplateRenderer

renderer = TemplateRenderer()
renderer.render("a", {})
child = os.fork()
for number in range(50):
    assert renderer.render("{{ x }}", {"x": f"{child == 0}{number}"}) == f"{child == 0}{number}"
if child:
    assert os.waitpid(child, 0)[1] == 0
    assert renderer.render("b", {}) == "b"
    print("both")
"""
    assert run_python(code) == "both\n"


@needs_proc
@pytest.mark.parametrize("busy", [False, True])
def test_the_process_ends_when_its_parent_is_killed(busy: bool) -> None:
    code = f"""
import threading
from tokenyard.model.template_renderer import TemplateRenderer

renderer = TemplateRenderer(1.0)
renderer.render("a", {{}})
print(renderer._process._process.pid, flush=True)
if {busy}:
    renderer.render({SLOW!r}, {{}})
threading.Event().wait()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    assert has_ended(child, within=10)


def has_ended(process: int, *, within: float) -> bool:
    end = time.monotonic() + within
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":  # nobody is left to wait for it
            return True
        threading.Event().wait(0.02)
    return False


def test_a_process_that_cannot_start_is_one_clear_error(renderer: TemplateRenderer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", "/nowhere/python")
        with pytest.raises(TokenyardError, match="does not start"):
            renderer.render("a", {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "path", [entry for entry in sys.path if "framework" not in entry])
        with pytest.raises(TokenyardError, match=r"does not start: .*tokenyard"):
            renderer.render("a", {})
    assert renderer.render("a", {}) == "a"
