"""`tokenyard serve` as the README starts it: the default model, asked by OpenAI's client, ended by SIGTERM."""

from __future__ import annotations

import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest
from http_server import DEADLINE, ProcessServer, server_process
from tokenyard import LLM, SamplingParams

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
SAME = ("--dtype", "float32", "--max-model-len", "512", "kv_cache.num_blocks=256", "executor.num_threads=1")
NUM_TOKENS = 16


class Answers(NamedTuple):
    """What one server has said and left."""

    whole: str
    streamed: str
    num_events: int
    listeners: set[tuple[str, int]]  # TCP addresses of all its processes
    exit_code: int
    log: str
    left: list[psutil.Process]
    files: list[str]  # in its folder for temporary files


@pytest.fixture(scope="module")
def answers(default_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    """One server from its start to its end: everything here looks at the same one."""
    folder = tmp_path_factory.mktemp("temporary")
    with server_process(SAME, environment={"TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}) as server:
        processes = [psutil.Process(server.process.pid)]
        whole, streamed, num_events = ask(server)
        processes += processes[0].children(recursive=True)
        addresses = listeners(processes)
        server.process.send_signal(signal.SIGTERM)
        code = server.process.wait(DEADLINE)
        gone, _ = psutil.wait_procs(processes, timeout=DEADLINE)
        left = [process for process in processes if process not in gone]
        files = [path.name for path in folder.iterdir()]
        yield Answers(whole, streamed, num_events, addresses, code, server.log, left, files)


def ask(server: ProcessServer) -> tuple[str, str, int]:
    """The answer to QUESTION, the same as a stream, and how many events with text that had."""
    with server.client() as client:
        common: Mapping[str, object] = {"model": "smollm2-135m", "messages": QUESTION}
        create = client.chat.completions.create
        whole = create(**common, temperature=0, max_tokens=NUM_TOKENS)  # type: ignore[call-overload]
        stream = create(**common, temperature=0, max_tokens=NUM_TOKENS, stream=True)  # type: ignore[call-overload]
        pieces = [
            chunk.choices[0].delta.content for chunk in stream if chunk.choices and chunk.choices[0].delta.content
        ]
    return whole.choices[0].message.content, "".join(pieces), len(pieces)


def listeners(processes: list[psutil.Process]) -> set[tuple[str, int]]:
    found = [one for process in processes for one in process.net_connections("tcp")]
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def test_the_answer_is_paris(answers: Answers) -> None:
    assert "Paris" in answers.whole


def test_a_stream_has_the_same_text_a_token_at_a_time(answers: Answers) -> None:
    assert answers.streamed == answers.whole
    assert answers.num_events > 1


def test_the_text_is_that_of_llm_chat(answers: Answers) -> None:
    keys = ["kv_cache.num_blocks=256", "executor.num_threads=1"]
    with LLM(dtype="float32", max_model_len=512, overrides=keys) as llm:
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
        (output,) = llm.chat(QUESTION, params, use_tqdm=False)
    assert answers.whole == output.outputs[0].text


def test_a3_without_tensor_parallelism_the_api_is_the_only_tcp_listener(answers: Answers) -> None:
    assert [host for host, _ in answers.listeners] == ["127.0.0.1"]


def test_sigterm_ends_it_with_0_and_nothing_is_left(answers: Answers) -> None:
    assert answers.exit_code == 0, answers.log
    assert "Traceback" not in answers.log
    assert answers.left == []
    assert answers.files == []
