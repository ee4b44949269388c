"""What the start and the end of `tokenyard serve` say and leave behind, whatever comes in between."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from http_server import DEADLINE, ProcessServer, server_process, wait_for
from own_process import short_folder
from tokenyard.engine.process import _last_words

FLAGS = ("--max-num-seqs=16", "--dtype=float32", "--served-model-name=tiny")
STAMP = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} "


@contextlib.contextmanager
def serving(model: Path, *arguments: str, wait: bool = True) -> Iterator[ProcessServer]:
    """A server of which nothing may be left at the end of the block: no process, no folder of sockets."""
    with server_process([str(model), *FLAGS, *arguments], wait=wait) as server:
        yield server
        server.process.wait(DEADLINE)
        wait_for(lambda: not server.family(), "processes are left")
        assert list(server.folder.iterdir()) == []


def begins(server: ProcessServer) -> bool:
    """The engine's process is there, and may not have come to anything yet."""
    return len(server.family()) == 2


def is_connected(server: ProcessServer) -> bool:
    return "importing the engine" in server.log


def loads(server: ProcessServer) -> bool:
    return "loading " in server.log


def is_ready(server: ProcessServer) -> bool:
    return "ready at" in server.log


@pytest.mark.parametrize("phase", [begins, is_connected, loads, is_ready])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_2_3_3_and_2_3_19_a_signal_at_any_point_of_the_start_leaves_nothing(
    tiny_llama_dir: Path, phase: Callable[[ProcessServer], bool], number: signal.Signals
) -> None:
    with serving(tiny_llama_dir, wait=False) as server:
        wait_for(lambda: phase(server), "the start does not come to that")
        server.process.send_signal(number)
        code = server.process.wait(DEADLINE)
        assert code == (-number if number is signal.SIGKILL else 0), server.log
        if number is not signal.SIGKILL:
            assert server.log.splitlines()[-1].endswith("stopped")
            assert "shutting down" in server.log


@pytest.mark.slow
@pytest.mark.parametrize("phase", [loads, is_ready])
def test_2_3_1_and_2_3_3_a_killed_server_leaves_nothing_of_its_ranks(
    tiny_llama_dir: Path, phase: Callable[[ProcessServer], bool]
) -> None:
    with serving(tiny_llama_dir, "executor=multiproc", "-tp=2", wait=False) as server:
        wait_for(lambda: phase(server), "the start does not come to that")
        server.process.kill()


def test_2_3_19_a_start_that_is_killed_before_the_engine_could_connect_leaves_nothing(tmp_path: Path) -> None:
    """The engine's process is told nothing and waits, as it does while a model is being fetched."""
    text = (
        "import sys, time\n"
        "from tokenyard.engine.process import EngineProcess\n"
        "from tokenyard.launch.engine_process import MODULE\n"
        "process = EngineProcess(MODULE)\n"
        "next(process.receive())\n"
        "print(process.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    with short_folder() as temporary:
        environment = {**os.environ, "TMPDIR": str(temporary)}
        with subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            engine = psutil.Process(int(process.stdout.readline()))
            assert "'tokenyard engine'" in " ".join(engine.cmdline())  # as `ps` shows it
            assert os.listdir(temporary)
            process.kill()
        assert psutil.wait_procs([engine], timeout=DEADLINE)[1] == []
        assert os.listdir(temporary) == []


def test_2_3_19_a_start_that_is_killed_before_it_removed_the_folder_of_its_sockets_leaves_nothing(
    tiny_llama_dir: Path,
) -> None:
    """Both ends are connected, the engine imports and loads."""
    text = (
        "import sys, time\n"
        "from tokenyard import LLM\n"
        "from tokenyard.ipc.sockets import SocketFolder\n"
        "def remove(self):\n"
        "    print('removes', flush=True)\n"
        "    time.sleep(600)\n"
        "SocketFolder.remove = remove\n"
        "LLM(sys.argv[1], overrides=['engine.process=own'])\n"
    )
    with short_folder() as temporary:
        command = [sys.executable, "-c", text, str(tiny_llama_dir)]
        environment = {**os.environ, "TMPDIR": str(temporary)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == b"removes\n"
            (engine,) = psutil.Process(process.pid).children()
            process.kill()
        assert psutil.wait_procs([engine], timeout=DEADLINE)[1] == []
        assert os.listdir(temporary) == []


def test_a_log_says_what_is_served_and_how_it_ended_and_all_its_lines_look_alike(tiny_llama_dir: Path) -> None:
    with serving(tiny_llama_dir, "--api-key=a", "--api-key=b", "--num-gpu-blocks-override=64") as server:
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(DEADLINE) == 0
        lines = server.log.splitlines()
    assert [line for line in lines if not re.match(STAMP, line)] == []
    (ready,) = [line for line in lines if " ready at " in line]
    assert re.search(
        rf"ready at {server.url} after [\d.]+ s: tiny, max_model_len 256, K/V cache of 1024 tokens "
        r"\(4\.0 requests of that length\), 2 API keys$",
        ready,
    )
    assert lines[-2].endswith("INFO: shutting down")
    assert lines[-1].endswith("INFO: stopped")


def test_it_says_that_it_listens_once_it_answers(tiny_llama_dir: Path) -> None:
    with serving(tiny_llama_dir, wait=False) as server:
        wait_for(lambda: "listening on" in server.log, "it does not listen")
        assert server.get("/startupz")[0] in (200, 503)
        assert server.get("/livez") == (200, '{"status":"ok"}')
        assert server.get("/nothing")[0] == 404  # waited for the routes
        server.process.send_signal(signal.SIGTERM)


def test_a_killed_engine_is_told_once_and_the_server_says_what_it_does(tiny_llama_dir: Path) -> None:
    with serving(tiny_llama_dir) as server:
        (engine,) = psutil.Process(server.process.pid).children()
        engine.kill()
        assert server.process.wait(DEADLINE) == 3
        log = server.log
    assert "was killed by SIGKILL; the server ends with code 3" in log
    assert "start a new one" not in log
    assert "last line" not in log  # it was none of an error


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("2026-01-01 00:00:00,000 INFO: attention=auto takes torch_native", ""),
        ("INFO: loaded", ""),
        ("DEBUG: x", ""),
        ("ERROR: no memory", " (its last line: ERROR: no memory)"),
        ("RuntimeError: INFO: what", " (its last line: RuntimeError: INFO: what)"),
        ("free(): invalid pointer ", " (its last line: free(): invalid pointer)"),
    ],
)
def test_the_last_line_of_a_dead_process_is_told_unless_all_was_well_then(line: str, told: str) -> None:
    assert _last_words(["ERROR: long ago", line]) == told
    assert _last_words([]) == ""


def test_a_template_that_is_missing_is_told_before_anything_is_started(tiny_llama_dir: Path) -> None:
    with serving(tiny_llama_dir, "--chat-template=/nowhere/template", wait=False) as server:
        assert server.process.wait(DEADLINE) == 2
        log = server.log
    assert "error: server.chat_template" in log
    assert "listening" not in log


def test_template_variables_are_checked_before_the_weights_are_there(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """With weights that cannot be read: that would be told if it came first."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"")
    given = json.dumps({"nobody": 1})
    with serving(folder, f"--default-chat-template-kwargs={given}", wait=False) as server:
        assert server.process.wait(DEADLINE) == 2
        log = server.log
    (error,) = [line for line in log.splitlines() if line.startswith("error: ")]
    assert "server.default_chat_template_kwargs" in error
    assert "ready at" not in log
