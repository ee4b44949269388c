"""An engine in a process of its own does what one in this process does."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
from own_process import (
    PACKAGE,
    letters_async_llm,
    letters_llm,
    link_of,
    nothing_left,
    probe_installed,
    process_of,
    short_folder,
    wait_for,
)
from tokenyard import LLM, AsyncLLM, RequestOutput, RequestOutputKind, SamplingParams
from tokenyard.errors import EngineDeadError, UserError, ValidationError
from tokenyard.interfaces.engine_core import PauseMode
from tokenyard.ipc.progress import EnginePhase

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
LONG = dataclasses.replace(GREEDY, max_tokens=100)
PROMPTS = ["hi", "the hi the", "hihihi the the", "he"]
PARAMS = {
    "greedy": GREEDY,
    "seeds": SamplingParams(seed=7, max_tokens=8, temperature=0.8, top_k=20, min_p=0.01, ignore_eos=True),
    "logprobs": dataclasses.replace(GREEDY, logprobs=3, prompt_logprobs=2),
    "choices": SamplingParams(n=3, seed=3, max_tokens=8),
    "edits": dataclasses.replace(
        GREEDY, logit_bias={5: 3.0}, allowed_token_ids=list(range(5, 90)), bad_words=["h"], presence_penalty=1.0
    ),
    "stops": dataclasses.replace(GREEDY, max_tokens=40, stop=["a", "b"], ignore_eos=False, stop_token_ids=[9]),
}


@pytest.fixture(scope="module", autouse=True)
def probe() -> Iterator[None]:
    with probe_installed():
        yield


@pytest.fixture(scope="module")
def both(tiny_llama_dir: Path) -> Iterator[tuple[LLM, LLM]]:
    """The same engine in this process and in its own."""
    options: dict[str, object] = {"dtype": "float32", "max_model_len": 128}
    here = LLM(tiny_llama_dir, overrides=["kv_cache.num_blocks=64"], **options)
    there = LLM(tiny_llama_dir, overrides=["kv_cache.num_blocks=64", "engine.process=own"], **options)
    yield here, there
    assert there.engine.core.stats().num_free_blocks == 64
    for llm in (here, there):
        llm.shutdown()


@pytest.fixture(scope="module")
def letters(tiny_llama_dir: Path) -> Iterator[LLM]:
    with letters_llm(tiny_llama_dir, "scheduler.policy.label=set in the parent") as made:
        yield made
        stats = made.engine.core.stats()
        assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (64, 0, 0)


@pytest.mark.parametrize("kind", PARAMS)
def test_outputs_are_those_of_an_engine_in_this_process(both: tuple[LLM, LLM], kind: str) -> None:
    here, there = (llm.generate(PROMPTS, PARAMS[kind], use_tqdm=False) for llm in both)
    for ours, theirs in zip(here, there, strict=True):
        assert ours.outputs == theirs.outputs
        assert ours.prompt_logprobs == theirs.prompt_logprobs
        assert ours.prompt_token_ids == theirs.prompt_token_ids
    assert both[1].engine.core.stats().num_free_blocks == 64


def test_times_are_of_this_processs_clock(both: tuple[LLM, LLM]) -> None:
    _, there = both
    before = there.engine.clock.now()
    (output,) = there.generate("hi", GREEDY, use_tqdm=False)
    metrics = output.metrics
    assert metrics is not None
    times = [metrics.arrival_time, metrics.first_scheduled_time, metrics.first_token_time, metrics.finished_time]
    assert None not in times
    assert before <= times[0] <= times[1] <= times[2] <= times[3] <= there.engine.clock.now()  # type: ignore[operator]


def test_what_the_engine_is_can_be_asked(both: tuple[LLM, LLM]) -> None:
    here, there = both
    for name in ("model", "max_model_len", "dtype", "vocab_size"):
        assert getattr(there.model_config, name) == getattr(here.model_config, name)
    ours, theirs = (dataclasses.replace(llm.engine.report, load_seconds=0.0) for llm in both)
    assert theirs == dataclasses.replace(ours, kv_cache_groups=theirs.kv_cache_groups)
    assert list(theirs.kv_cache_groups) == list(ours.kv_cache_groups)
    assert there.engine.num_blocks == 64
    assert {metric.name for metric in there.get_metrics()} == {metric.name for metric in here.get_metrics()}


def test_plg_04_settings_and_metadata_reach_the_policy_as_typed_there(letters: LLM) -> None:
    """Settings made in the parent are sent, not assumed; policy metadata is rebuilt with the policy's type."""
    hints = {
        "task": "tell",
        "mood": "WILD",
        "seat": {"row": 3, "side": "right"},
        "tags": ["x", "y"],
        "client": "me",
        "session": "s",
        "deadline": 100,
        "slo": {"ttft": 1.5},
    }
    (output,) = letters.generate("hi", GREEDY, scheduling=hints, use_tqdm=False)
    pid = process_of(letters).pid
    told, age_is_sane, level = str(output.error).removeprefix("rejected by scheduling policy probe: ").split("|")
    assert told == (
        f"('set in the parent', {pid}, {{'task': 'tell', 'mood': <Mood.WILD: 'wild'>, "
        "'seat': Seat(row=3, side='right'), 'tags': ('x', 'y')}, 'me', 's', 100)"
    )
    assert (age_is_sane, level) == ("True", "ServiceLevel(ttft=1.5, tpot=None, e2e=None)")


def test_one_refusal_queues_none_and_is_the_error_it_would_be_here(letters: LLM) -> None:
    make = letters._front.inputs.make_requests
    prompt = letters.tokenize("hi")
    good, bad = make("g", prompt, GREEDY, 0.0)[0], make("b", prompt, GREEDY, 0.0)[0]
    core = letters.engine.core
    with pytest.raises(ValidationError, match="stop_token_ids") as raised:
        letters._client._add_requests([good, dataclasses.replace(bad, stop_token_ids=(10**6,))])
    assert raised.value.parameter == "stop_token_ids"
    assert not core.has_requests()
    assert core.stats().num_waiting == core.stats().num_running == 0


def test_e1_ids_are_text_and_unknown_ones_are_ignored_when_they_end(letters: LLM) -> None:
    """2.3 #23"""
    core, prompt = letters.engine.core, letters.tokenize("hi")
    (request,) = letters._front.inputs.make_requests("one", prompt, LONG, letters.engine.clock.now())
    with pytest.raises(TypeError, match="a request id is a string; got 7"):
        core.add_request(dataclasses.replace(request, request_id=7))  # type: ignore[arg-type]
    core.add_request(request)
    with pytest.raises(ValidationError, match="one"):
        core.add_request(request)
    from tokenyard.request import FinishReason

    assert core.finish_requests(["nobody", "one", "one"], FinishReason.ABORT) == ["one"]
    assert core.finish_requests(["one"], FinishReason.ABORT) == []
    while core.has_requests():
        core.step()
    core.add_request(dataclasses.replace(request, params=GREEDY))  # an id may be used again
    while core.has_requests():
        core.step()
    assert core.stats().num_free_blocks == 64


def test_ctrl_c_ends_the_requests_and_keeps_the_engine(letters: LLM) -> None:
    seen = []

    def interrupt(piece: str) -> None:
        seen.append(piece)
        if len(seen) == 2:
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        letters.stream(letters.tokenize("the"), LONG, interrupt)
    assert not letters.engine.core.has_requests()
    assert letters.engine.core.stats().num_free_blocks == 64
    assert letters.reset_prefix_cache()
    assert letters.generate("hi", GREEDY, use_tqdm=False)[0].outputs[0].finish_reason == "length"


def test_with_overlap_no_step_of_an_ended_request_holds_a_block(tiny_llama_dir: Path) -> None:
    with letters_llm(tiny_llama_dir, "engine=overlap", "executor.step_seconds=0.1") as llm:
        for _ in range(3):
            output = llm.stream(llm.tokenize("the"), LONG, lambda piece: False)
            assert output.outputs[0].finish_reason == "abort"
            assert llm.engine.core.stats().num_free_blocks == 64
            assert llm.reset_prefix_cache()


def test_e5_a_pause_holds_requests_and_a_resume_lets_them_go(letters: LLM) -> None:
    core = letters.engine.core
    assert core.pause(PauseMode.KEEP) == []
    assert core.is_paused
    with pytest.raises(UserError, match="paused"):
        letters.generate("hi", GREEDY, use_tqdm=False)
    core.resume()
    (request_id,) = letters.enqueue("hi", LONG)
    core.pause(PauseMode.ABORT)
    core.resume()
    (output,) = letters.wait_for_completion(use_tqdm=False)
    assert (output.request_id, output.outputs[0].finish_reason) == (request_id, "abort")


def test_progress_is_seen_without_asking(letters: LLM) -> None:
    process = process_of(letters)
    wait_for(lambda: process.progress.read().phase is EnginePhase.IDLE, "the engine does not become idle")
    before = process.progress.read()
    letters.generate(PROMPTS, GREEDY, use_tqdm=False)
    wait_for(lambda: process.progress.read().phase is EnginePhase.IDLE, "the engine does not become idle")
    after = process.progress.read()
    assert after.num_steps - before.num_steps >= 8
    assert after.num_unfinished == before.num_unfinished == 0


def test_e6_a_health_check_of_one_that_lives(letters: LLM) -> None:
    assert link_of(letters).check_health() == 0


def test_a_forked_process_cannot_use_the_engine_and_does_not_end_it(letters: LLM) -> None:
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        said = b"nothing"
        try:
            letters.engine.core.stats()
        except EngineDeadError as error:
            said = str(error).encode()
        try:
            letters.shutdown()
        finally:
            os.write(writer, said)
            os._exit(0)
    os.close(writer)
    said = os.read(reader, 1000)
    os.close(reader)
    os.waitpid(pid, 0)
    assert b"does not live on in a forked process" in said
    assert letters.generate("hi", GREEDY, use_tqdm=False)[0].finished


def listeners(pid: int) -> list[str]:
    """The TCP sockets of a process that listen, as /proc/net/tcp spells their addresses."""
    inodes = set()
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        try:
            inodes.add(os.readlink(descriptor))
        except OSError:
            continue
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]
    return [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]


def test_a3_no_process_listens_on_a_port(both: tuple[LLM, LLM], letters: LLM) -> None:
    for llm in (both[1], letters):
        assert listeners(process_of(llm).pid) == []
    assert listeners(os.getpid()) == []


def test_no_folder_is_there_while_it_runs_and_nothing_at_all_afterwards(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters_llm(tiny_llama_dir).shutdown()  # what is made once a process is made now
    with nothing_left(), short_folder() as folder:
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        llm = letters_llm(tiny_llama_dir)
        assert list(folder.iterdir()) == []
        llm.generate("hi", GREEDY, use_tqdm=False)
        llm.shutdown()
        llm.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            llm.generate("hi", GREEDY, use_tqdm=False)
        with pytest.raises(EngineDeadError, match="shut down"):
            llm.reset_prefix_cache()


def test_one_that_is_forgotten_ends_its_process(tiny_llama_dir: Path) -> None:
    with nothing_left():
        letters_llm(tiny_llama_dir)
    with nothing_left():
        letters_async_llm(tiny_llama_dir)


def test_the_process_of_the_front_end_imports_no_torch(tiny_llama_dir: Path) -> None:
    script = (
        f"import sys; sys.path.insert(0, {str(PACKAGE)!r})\n"
        "from tokenyard import LLM, SamplingParams\n"
        f"llm = LLM({str(tiny_llama_dir)!r}, overrides=['engine.process=own', 'executor=letters'])\n"
        "print(llm.generate('hi', SamplingParams(max_tokens=3), use_tqdm=False)[0].outputs[0].token_ids)\n"
        "print(sorted({'torch', 'transformers', 'pydantic'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.splitlines()[1:] == ["[]"], done.stderr


# AsyncLLM


@pytest.fixture(scope="module")
def streams(tiny_llama_dir: Path) -> Iterator[AsyncLLM]:
    made = letters_async_llm(tiny_llama_dir, "executor.step_seconds=0.001")
    yield made
    link_of(made).settle()
    assert made._link.stats().num_free_blocks == 64
    made.shutdown()


async def last(stream: AsyncIterator[RequestOutput]) -> RequestOutput:
    return [output async for output in stream][-1]


def test_e3_many_streams_at_once_end_whole_and_some_that_are_cancelled_leave_nothing(streams: AsyncLLM) -> None:
    async def abandon() -> None:
        async for _ in streams.generate("the hi", LONG):
            return

    async def main() -> list[RequestOutput]:
        outputs = await asyncio.gather(*(last(streams.generate(prompt, GREEDY)) for prompt in PROMPTS * 8))
        await asyncio.gather(*(abandon() for _ in range(10)))
        return outputs

    outputs = asyncio.run(asyncio.wait_for(main(), 60))
    assert [output.outputs[0].finish_reason for output in outputs] == ["length"] * 32
    for output in outputs:
        start = len(output.prompt_token_ids)
        assert output.outputs[0].token_ids == [65 + (start + index) % 26 for index in range(8)]
    link_of(streams).settle()
    assert streams._link.stats().num_free_blocks == 64


@pytest.mark.parametrize("process", ["own", "in"])
def test_a_stop_string_ends_its_request_in_the_engine(tiny_llama_dir: Path, process: str) -> None:
    with_stop = dataclasses.replace(LONG, stop=["d"])
    with letters_both(tiny_llama_dir, process) as llm:

        async def main() -> RequestOutput:
            output = await last(llm.generate([5], with_stop))
            while llm._link.stats().num_running:
                await asyncio.sleep(0.005)
            return output

        output = asyncio.run(asyncio.wait_for(main(), 60))
        assert (output.outputs[0].finish_reason, output.outputs[0].stop_reason) == ("stop", "d")
        stats = llm._link.stats()
        assert (stats.num_free_blocks, stats.num_running) == (64, 0)
        assert stats.num_generation_tokens < 50  # of 100


@pytest.mark.parametrize("process", ["own", "in"])
def test_of_requests_that_are_refused_together_none_is_left_in_the_engine(tiny_llama_dir: Path, process: str) -> None:
    with letters_both(tiny_llama_dir, process) as llm:
        make, prompt = llm._front.inputs.make_requests, llm._front.tokenize("hi")
        good, bad = make("g", prompt, LONG, 0.0)[0], make("b", prompt, LONG, 0.0)[0]
        llm._link.add([good, dataclasses.replace(bad, stop_token_ids=(10**6,))])
        stats = llm._link.stats()
        assert (stats.num_running, stats.num_waiting) == (0, 0)


@contextlib.contextmanager
def letters_both(model: Path, process: str) -> Iterator[AsyncLLM]:
    """Slow letters in a process of their own, or in this one."""
    made = letters_async_llm(model, f"engine.process={process}", "executor.step_seconds=0.03")
    try:
        yield made
    finally:
        made.shutdown()


def test_tokens_come_in_order_and_once(streams: AsyncLLM) -> None:
    async def collect(prompt: str) -> tuple[list[int], int]:
        delta = dataclasses.replace(LONG, output_kind=RequestOutputKind.DELTA)
        tokens: list[int] = []
        async for output in streams.generate(prompt, delta):
            tokens += output.outputs[0].token_ids
            start = len(output.prompt_token_ids)
        return tokens, start

    async def main() -> list[tuple[list[int], int]]:
        return await asyncio.gather(*(collect(prompt) for prompt in PROMPTS))

    for tokens, start in asyncio.run(asyncio.wait_for(main(), 60)):
        assert tokens == [65 + (start + index) % 26 for index in range(100)]


def test_e4_an_abort_by_label_ends_its_stream_with_the_tokens_so_far(streams: AsyncLLM) -> None:
    async def main() -> RequestOutput:
        stream = streams.generate("hi", LONG, request_id="mine")
        await anext(stream)
        await streams.abort("mine")
        return await last(stream)

    output = asyncio.run(asyncio.wait_for(main(), 60))
    assert output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids


def test_a_refusal_of_the_engine_reaches_its_own_stream_alone(streams: AsyncLLM) -> None:
    async def main() -> tuple[object, RequestOutput]:
        tell = streams.generate("hi", GREEDY, priority=2**60)
        return await asyncio.gather(last(tell), last(streams.generate("he", GREEDY)), return_exceptions=True)  # type: ignore[return-value]

    error, output = asyncio.run(asyncio.wait_for(main(), 60))
    assert isinstance(error, ValidationError)
    assert error.parameter == "priority"
    assert output.finished


def test_metrics_and_the_prefix_cache_are_reached_between_steps(streams: AsyncLLM) -> None:
    async def main() -> bool:
        stream = streams.generate("the hi the hi the hi the", LONG)
        await anext(stream)
        metrics = {metric.name: metric for metric in await streams.get_metrics()}
        assert "tokenyard:generation_tokens" in metrics
        is_reset = await streams.reset_prefix_cache()
        await stream.aclose()
        return is_reset

    assert not asyncio.run(asyncio.wait_for(main(), 60))


def test_phases_of_a_start_are_told_in_words(tiny_llama_dir: Path) -> None:
    from tokenyard.launch.compose import load_engine_config

    phases: list[str] = []
    config, catalogue = load_engine_config(
        [f"model.name={tiny_llama_dir}", "engine.process=own", "executor=letters", "kv_cache.num_blocks=64"]
    )
    AsyncLLM.from_parts(config, catalogue, on_progress=phases.append).shutdown()
    assert "learning the letters" in phases


def test_it_can_be_made_in_a_thread_that_ends(tiny_llama_dir: Path) -> None:
    made: list[LLM] = []
    thread = threading.Thread(target=lambda: made.append(letters_llm(tiny_llama_dir)))
    thread.start()
    thread.join()
    (llm,) = made
    assert llm.generate("hi", GREEDY, use_tqdm=False)[0].finished
    llm.shutdown()
