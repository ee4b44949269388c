"""A server from its start to its end: signals, drain, deaths, restarts. `tokenyard serve` as a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import openai
import psutil
import pytest
from http_server import DEADLINE, ProcessServer, http_get, server_process, wait_for

LONG = 4000  # tokens: seconds of work, also for the tiny model
FLAGS = ("--max-num-seqs=16", "--num-gpu-blocks-override=4096", "--dtype=float32", "--served-model-name=tiny")


@pytest.fixture(scope="module")
def long_model(tiny_llama_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with room for long answers."""
    folder = tmp_path_factory.mktemp("long") / "tiny"
    shutil.copytree(tiny_llama_dir, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 32768}), encoding="utf-8")
    return folder


@contextlib.contextmanager
def serving(model: Path, *arguments: str) -> Iterator[ProcessServer]:
    with server_process([str(model), *FLAGS, *arguments]) as server:
        yield server


class Reader:
    """A client that reads a stream in a thread: how many chunks came, how it ended."""

    def __init__(self, server: ProcessServer, max_tokens: int) -> None:
        self.num_chunks = 0
        self.finish_reason: str | None = None
        self._client = server.client()
        self._max_tokens = max_tokens

    def read(self) -> None:
        with self._client.completions.create(
            model="tiny",
            prompt="hi the hi",
            max_tokens=self._max_tokens,
            stream=True,
            temperature=0,
            extra_body={"ignore_eos": True},
        ) as stream:
            for chunk in stream:
                self.num_chunks += 1
                for choice in chunk.choices:
                    self.finish_reason = choice.finish_reason or self.finish_reason


@contextlib.contextmanager
def reading(server: ProcessServer, count: int, max_tokens: int) -> Iterator[tuple[list[Reader], list[Future[None]]]]:
    """So many streams, each of which has begun."""
    readers = [Reader(server, max_tokens) for _ in range(count)]
    with ThreadPoolExecutor(count) as pool:
        futures = [pool.submit(reader.read) for reader in readers]
        wait_for(
            lambda: all(reader.num_chunks for reader in readers) or any(future.done() for future in futures),
            "no chunks",
        )
        yield readers, futures


def complete(server: ProcessServer, max_tokens: int = 2) -> str:
    answer = server.client().completions.create(model="tiny", prompt="hi", max_tokens=max_tokens)
    return answer.choices[0].text


def ended(server: ProcessServer) -> int:
    """Its exit code; everything that it started is gone: processes, folders of sockets."""
    code = server.process.wait(DEADLINE)
    wait_for(lambda: not server.family(), "processes are left")
    assert list(server.folder.glob("ty-*")) == []
    return code


def engine_of(server: ProcessServer) -> psutil.Process:
    """The process of its engine: what has torch loaded."""
    children = psutil.Process(server.process.pid).children()
    found = [child for child in children if any("libtorch" in row.path for row in child.memory_maps())]
    assert len(found) == 1, [child.cmdline() for child in children]
    return found[0]


def test_2_3_17_sigterm_lets_running_requests_end_and_takes_no_new_ones(long_model: Path) -> None:
    with serving(long_model, "--shutdown-timeout=600") as server, reading(server, 10, 1000) as (readers, futures):
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/readyz")[0] == 503, "/readyz does not tell")
        assert json.loads(server.get("/readyz")[1])["status"] == "draining"
        assert server.get("/livez")[0] == 200
        with pytest.raises(openai.InternalServerError) as caught:
            complete(server)
        assert caught.value.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        for future in futures:
            future.result(DEADLINE)
        assert {reader.finish_reason for reader in readers} == {"length"}
        assert ended(server) == 0


@pytest.mark.slow
def test_2_3_18_without_a_drain_clients_get_the_end_of_their_streams(long_model: Path) -> None:
    with serving(long_model) as server, reading(server, 4, LONG) as (readers, futures):
        server.process.send_signal(signal.SIGTERM)
        for future in futures:
            future.result(DEADLINE)
        assert {reader.finish_reason for reader in readers} == {"abort"}
        assert ended(server) == 0


@pytest.mark.slow
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_2_3_18_a_second_signal_ends_a_drain_at_once(long_model: Path, second: signal.Signals) -> None:
    with serving(long_model, "--shutdown-timeout=600") as server, reading(server, 2, LONG) as (readers, futures):
        server.process.send_signal(signal.SIGINT)
        wait_for(lambda: server.get("/health")[0] == 503, "/health does not tell")
        assert not any(future.done() for future in futures)
        server.process.send_signal(second)
        for future in futures:
            future.result(DEADLINE)
        assert {reader.finish_reason for reader in readers} == {"abort"}
        assert ended(server) == 0


@pytest.mark.slow
def test_prc_01_and_prc_02_a_killed_engine_is_told_to_everybody(long_model: Path) -> None:
    """Also 2.3 #2, and SCH-12's half about health."""
    with serving(long_model) as server, reading(server, 3, LONG) as (readers, futures):
        engine = engine_of(server)
        with ThreadPoolExecutor(1) as pool:
            whole = pool.submit(complete, server, LONG)
            wait_for(lambda: running_requests(server) == 4, "the fourth request does not run")
            os.kill(engine.pid, signal.SIGKILL)
            seen = statuses_until_the_end(server)
            with pytest.raises(openai.APIStatusError) as caught:
                whole.result(DEADLINE)
            assert caught.value.status_code == 503
        for future in futures:
            with pytest.raises(openai.APIError):
                future.result(DEADLINE)
        assert all(reader.finish_reason is None for reader in readers)
        assert {path: 503 in found for path, found in seen.items()} == dict.fromkeys(seen, True)
        assert ended(server) == 3
        assert "SIGKILL" in server.log


@pytest.mark.slow
def test_2_3_1_a_killed_worker_is_told_to_everybody(long_model: Path) -> None:
    """Also that nobody uses shared memory with a name, whose folder may be tiny: 2.3 #19."""
    with (
        serving(long_model, "executor=multiproc", "executor.tensor_parallel_size=2") as server,
        reading(server, 3, LONG) as (_, futures),
    ):
        family = server.family()
        workers = [process for process in family if "multiproc_main" in " ".join(process.cmdline())]
        assert (len(workers), len(family)) == (2, 4)
        assert [path for process in family for path in in_shared_memory(process)] == []
        workers[1].kill()
        killed_at = time.monotonic()
        wait_for(lambda: server.get("/readyz")[0] == 503, "/readyz does not tell", 1.0)
        for future in futures:
            with pytest.raises(openai.APIError):
                future.result(DEADLINE)
        assert time.monotonic() - killed_at < 2.0  # the row's own number, some ten times what it takes
        assert ended(server) == 3
        assert "was killed by SIGKILL" in server.log


def in_shared_memory(process: psutil.Process) -> list[str]:
    """What a process has mapped of, or open in, /dev/shm."""
    paths = [row.path for row in process.memory_maps()] + [file.path for file in process.open_files()]
    return [path for path in paths if path.startswith("/dev/shm/")]


def test_a_signal_to_a_server_whose_engine_is_dead_does_not_hide_that(long_model: Path) -> None:
    with serving(long_model) as server:
        engine_of(server).kill()
        wait_for(lambda: server.get("/readyz")[0] == 503, "/readyz does not tell")
        server.process.send_signal(signal.SIGTERM)
        assert ended(server) == 3


@pytest.mark.slow
def test_an_engine_that_dies_in_a_drain_is_no_orderly_end(long_model: Path) -> None:
    with serving(long_model, "--shutdown-timeout=600") as server, reading(server, 2, LONG) as (_, futures):
        engine = engine_of(server)
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: server.get("/readyz")[0] == 503, "/readyz does not tell")
        engine.kill()
        for future in futures:
            with pytest.raises(openai.APIError):
                future.result(DEADLINE)
        assert ended(server) == 3


def running_requests(server: ProcessServer) -> int:
    lines = server.get("/metrics")[1].splitlines()
    found = [line for line in lines if line.startswith("tokenyard:num_requests_running")]
    return int(float(found[0].split()[-1])) if found else 0


def statuses_until_the_end(server: ProcessServer) -> dict[str, set[int]]:
    """What probes answer until nobody answers any more."""
    seen: dict[str, set[int]] = {"/health": set(), "/readyz": set(), "/livez": set()}
    end = time.monotonic() + DEADLINE
    with contextlib.suppress(OSError):
        while server.process.poll() is None and time.monotonic() < end:
            for path, found in seen.items():
                found.add(server.get(path)[0])
            time.sleep(0.01)
    return seen


@pytest.mark.slow
def test_2_3_2_a_dead_engine_is_started_again_where_that_is_wanted(long_model: Path) -> None:
    with serving(long_model, "--restart-engine") as server:
        text = complete(server)
        first = engine_of(server).pid
        os.kill(first, signal.SIGKILL)
        wait_for(lambda: server.get("/readyz")[0] == 503, "/readyz does not tell")
        assert server.get("/livez")[0] == 200
        server.wait_ready()
        assert engine_of(server).pid != first
        assert complete(server) == text
        server.process.send_signal(signal.SIGTERM)
        assert ended(server) == 0


@pytest.mark.slow
def test_2_3_3_the_engine_ends_with_a_killed_server(long_model: Path) -> None:
    with serving(long_model) as server, reading(server, 2, LONG) as (_, futures):
        children = psutil.Process(server.process.pid).children(recursive=True)
        server.process.kill()
        assert psutil.wait_procs(children, timeout=DEADLINE)[1] == []
        for future in futures:
            with pytest.raises(openai.APIError):
                future.result(DEADLINE)


@pytest.mark.slow
def test_a_signal_while_the_engine_starts_ends_the_server(long_model: Path) -> None:
    with server_process([str(long_model), *FLAGS], wait=False) as server:
        wait_for(lambda: len(server.family()) == 2, "no engine is started")
        wait_for(lambda: answers(server), "/startupz does not answer")
        status, body = server.get("/startupz")
        if status == 503:
            assert set(json.loads(body)) == {"status", "phase", "percent"}
        server.process.send_signal(signal.SIGTERM)
        assert ended(server) == 0


def answers(server: ProcessServer) -> bool:
    assert server.process.poll() is None, server.log
    with contextlib.suppress(OSError):
        return server.get("/startupz")[0] in (200, 503)
    return False


def run_to_its_end(arguments: Sequence[str], environment: dict[str, str] | None = None) -> tuple[int, str]:
    with server_process(arguments, wait=False, environment=environment) as server:
        return ended(server), server.log


def a_folder_that_is_not_there(folder: Path) -> list[str]:
    return [str(folder / "nothing")]


def truncated_weights(folder: Path) -> list[str]:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    return [str(folder)]


def a_dtype_that_is_none(folder: Path) -> list[str]:
    return [str(folder), "--dtype=int3"]


def a_cache_that_is_too_small(folder: Path) -> list[str]:
    return [str(folder), "kv_cache.memory=1KiB"]


def a_template_that_is_broken(folder: Path) -> list[str]:
    return [str(folder), "--chat-template={% for %}"]


def a_config_that_is_broken(folder: Path) -> list[str]:
    return [str(folder), "scheduler.max_num_seqs=0"]


START_FAILURES: list[tuple[Callable[[Path], list[str]], Sequence[str]]] = [
    (a_folder_that_is_not_there, ("nothing",)),
    (truncated_weights, ("model.safetensors",)),
    (a_dtype_that_is_none, ("model.dtype", "float32")),
    (a_cache_that_is_too_small, ("K/V",)),
    (a_template_that_is_broken, ("server.chat_template",)),
    (a_config_that_is_broken, ("scheduler.max_num_seqs",)),
]


@pytest.mark.slow
@pytest.mark.parametrize(("make", "pieces"), START_FAILURES, ids=[make.__name__ for make, _ in START_FAILURES])
def test_prc_08_and_2_3_19_a_start_that_fails_says_why_and_leaves_nothing(
    tiny_llama_dir: Path, tmp_path: Path, make: Callable[[Path], list[str]], pieces: Sequence[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_llama_dir, folder)
    code, log = run_to_its_end(make(folder))
    assert code == 2, log
    (error,) = [line for line in log.splitlines() if line.startswith("error: ")]
    assert [piece for piece in pieces if piece not in error] == [], log
    assert "Traceback" not in log


@pytest.mark.slow
@pytest.mark.parametrize("size", [0, 16])
def test_2_3_19_a_disk_that_is_full_is_one_line_with_advice(tiny_llama_dir: Path, size: int) -> None:
    """No file of more than so many bytes can be written: not in TMPDIR, not in /tmp, nowhere."""
    command = [sys.executable, "-c", "from tokenyard.cli import main; main()", "serve", str(tiny_llama_dir), "--port=0"]
    done = subprocess.run(
        ["prlimit", f"--fsize={size}", *command], capture_output=True, text=True, timeout=DEADLINE, check=False
    )
    *_, line = done.stderr.splitlines()
    assert (done.returncode, line.startswith("error: "), "TMPDIR" in line) == (2, True, True), done.stderr
    assert "Traceback" not in done.stderr


CANARY = "canary-5f1d77e0"


def test_a9_no_key_stands_anywhere(tiny_llama_dir: Path, tmp_path: Path) -> None:
    """However it was given; the server's own command line is what secure-a-server.md warns of. Up to a crash dump."""
    keys = [f"{CANARY}-{origin}" for origin in ("environment", "flag", "file")]
    file = tmp_path / "keys"
    file.write_text(f"# {CANARY}\n{keys[2]}\n", encoding="utf-8")
    arguments = [str(tiny_llama_dir), *FLAGS, "--enable-log-requests", "--log-level=debug"]
    arguments += [f"--api-key={keys[1]}", f"--api-key-file={file}"]
    with server_process(arguments, environment={"TOKENYARD_API_KEY": keys[0]}) as server:
        texts = [text for key in keys for text in texts_with(server, key)]
        assert any("tiny" in text for text in texts)
        texts += [" ".join(process.cmdline()) for process in server.family() if process.pid != server.process.pid]
        os.kill(engine_of(server).pid, signal.SIGSEGV)
        assert ended(server) == 3
        assert "Segmentation fault" in server.log
        texts += [path.read_text(errors="replace") for path in server.folder.rglob("*") if path.is_file()]
        assert CANARY not in server.log + "".join(texts)


def texts_with(server: ProcessServer, key: str) -> list[str]:
    """What routes answer to who has a key, and to who has none."""
    with server.client(api_key=key) as client:
        client.completions.create(model="tiny", prompt="hi", max_tokens=2)
        with pytest.raises(openai.NotFoundError) as caught:
            client.completions.create(model="other", prompt="hi", max_tokens=2)
    paths = ("/health", "/metrics", "/v1/models", "/version", "/openapi.json", "/debug/requests", "/nothing")
    headers = {"Authorization": f"Bearer {key}"}
    return [
        caught.value.response.text,
        *(http_get(server.url + path, own)[1] for path in paths for own in (headers, {})),
    ]
