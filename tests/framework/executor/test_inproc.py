"""InProcessExecutor: its order of calls, its thread, and the functions it publishes."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenyard import LLM
from tokenyard.config import AttentionConfig, EngineConfig, ModelConfig
from tokenyard.errors import ConfigError, EngineDeadError, ModelLoadError, PluginError, UnsupportedError
from tokenyard.executor.inproc import InProcessExecutor
from tokenyard.interfaces import AttentionSpec, ExecutorContext, GrammarOutput, KVCacheLayout, KVCachePlan
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler_output import RequestStart, SchedulerOutput, Slot
from tokenyard.worker import device
from tokenyard.worker.worker import Worker
from tokenyard_backends.torch_native.backend import TorchNativeBackend

THREAD = "tokenyard-executor"


def make(folder: Path | str, steps_in_flight: int) -> InProcessExecutor:
    made = InProcessExecutor(ExecutorContext(steps_in_flight=steps_in_flight))
    report = made.initialize(
        EngineConfig(model=ModelConfig(name=str(folder)), attention=AttentionConfig(name="torch_native"))
    )
    assert report.decoder == "fast decoder (llama)"
    assert report.attention_backend == "torch_native"
    assert (
        report.kv_cache_groups[0].bytes_per_token == 2 * 2 * 2 * 16 * 4
    )  # layers, K and V, KV heads, head size, float32
    made.allocate_kv_cache(KVCachePlan(num_blocks=4, block_size=16))
    return made


@pytest.fixture(params=[1, 2], ids=["in the caller's thread", "in its own thread"])
def executor(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> Iterator[InProcessExecutor]:
    made = make(tiny_llama_dir, request.param)
    yield made
    made.shutdown()


@pytest.fixture
def threaded(tiny_llama_dir: Path) -> Iterator[InProcessExecutor]:
    made = make(tiny_llama_dir, 2)
    yield made
    made.shutdown()


def step(number: int) -> SchedulerOutput:
    """Greedy decoding of one request: step 0 is a prefill of three tokens, each later one takes the token before it."""
    start = RequestStart(
        request_id="a",
        slot=Slot(0, 1),
        token_ids=np.array([5, 6, 7], dtype=np.int32),
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=(np.array([1, 2], dtype=np.int32),),
        params=SamplingParams(temperature=0),
    )
    return SchedulerOutput(
        step=number,
        new=() if number else (start,),
        slots=np.zeros(1, dtype=np.int32),
        generations=np.ones(1, dtype=np.int32),
        num_computed_tokens=np.array([2 + number if number else 0], dtype=np.int32),
        num_scheduled_tokens=np.array([1 if number else 3], dtype=np.int32),
        samples=np.ones(1, dtype=np.bool_),
    )


def executor_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith(THREAD)]


def tokens_of(executor: InProcessExecutor, num_steps: int) -> list[int]:
    """All steps are handed over before the first is waited for."""
    futures = []
    for number in range(num_steps):
        executor.execute_model(step(number))
        futures.append(executor.sample_tokens())
    results = [future.result() for future in futures]
    assert [result.step for result in results] == list(range(num_steps))
    assert all(future.ready_at is None for future in futures)
    return [token for result in results for token in result.token_ids.tolist()]


def test_published_functions_can_be_called_and_nothing_else(executor: InProcessExecutor) -> None:
    assert executor.collective_rpc("device_name") == ["cpu"]
    assert executor.collective_rpc("memory_allocated") == [0]
    for name in ("load", "__init__", "_ready", "execute"):
        with pytest.raises(ConfigError, match="device_name, memory_allocated"):
            executor.collective_rpc(name)
    executor.check_health()  # a wrong name harms nobody


def test_a_step_is_executed_once_and_sampled_once(executor: InProcessExecutor) -> None:
    with pytest.raises(RuntimeError, match="without a step"):
        executor.sample_tokens()
    executor.execute_model(step(0))
    with pytest.raises(RuntimeError, match="before sample_tokens"):
        executor.execute_model(step(1))
    with pytest.raises(UnsupportedError, match="structured outputs"):
        executor.sample_tokens(GrammarOutput(slots=(0,), bitmask=b""))
    assert executor.sample_tokens().result().step == 0
    with pytest.raises(RuntimeError, match="without a step"):
        executor.sample_tokens()


def test_before_initialize_and_after_shutdown_nothing_runs(executor: InProcessExecutor) -> None:
    executor.check_health()
    executor.shutdown()
    executor.shutdown()
    for other in (executor, InProcessExecutor(ExecutorContext())):
        with pytest.raises(EngineDeadError, match="not running"):
            other.check_health()
        with pytest.raises(RuntimeError, match="not running"):
            other.execute_model(step(0))
        with pytest.raises(RuntimeError, match="not running"):
            other.collective_rpc("device_name")
        with pytest.raises(RuntimeError, match="not running"):
            other.allocate_kv_cache(KVCachePlan(num_blocks=4, block_size=16))


def test_steps_handed_over_at_once_give_the_tokens_of_steps_one_by_one(tiny_llama_dir: Path) -> None:
    one, several = make(tiny_llama_dir, 1), make(tiny_llama_dir, 3)
    wanted = tokens_of(one, 12)
    assert len(set(wanted)) > 1
    assert tokens_of(several, 12) == wanted
    one.shutdown()
    several.shutdown()


def test_everything_the_worker_does_happens_in_one_thread_in_the_order_given(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, str]] = []
    for name in ("__init__", "load", "allocate_kv_cache", "execute", "sample", "call"):
        _log_calls(monkeypatch, name, calls)
    executor = make(tiny_llama_dir, 2)
    tokens_of(executor, 2)
    executor.collective_rpc("device_name")
    executor.shutdown()
    assert [name for name, _ in calls] == [
        *("__init__", "load", "allocate_kv_cache", "execute", "sample", "execute", "sample", "call")
    ]
    (thread,) = {thread for _, thread in calls}
    assert thread.startswith(THREAD)


def _log_calls(monkeypatch: pytest.MonkeyPatch, name: str, calls: list[tuple[str, str]]) -> None:
    original = getattr(Worker, name)

    def logged(self: Worker, *arguments: object) -> object:
        calls.append((name, threading.current_thread().name))
        return original(self, *arguments)

    monkeypatch.setattr(Worker, name, logged)


def test_the_call_returns_before_the_step_has_run(threaded: InProcessExecutor, monkeypatch: pytest.MonkeyPatch) -> None:
    may_run, execute = threading.Event(), Worker.execute

    def held_back(self: Worker, output: SchedulerOutput) -> None:
        may_run.wait()
        execute(self, output)

    monkeypatch.setattr(Worker, "execute", held_back)
    threaded.execute_model(step(0))
    future = threaded.sample_tokens()  # would never return in one thread
    may_run.set()
    assert future.result().step == 0


@pytest.mark.parametrize("part", ["execute", "sample"])
@pytest.mark.parametrize("error", [ArithmeticError("bad weights"), KeyboardInterrupt(), SystemExit(3)], ids=repr)
def test_what_a_step_raises_comes_out_of_its_result_and_of_every_later_one(
    threaded: InProcessExecutor, monkeypatch: pytest.MonkeyPatch, part: str, error: BaseException
) -> None:
    runs: list[str] = []

    def fail(self: Worker, *arguments: object) -> None:
        runs.append(part)
        raise error

    monkeypatch.setattr(Worker, part, fail)
    futures = []
    for number in range(3):
        threaded.execute_model(step(number))
        futures.append(threaded.sample_tokens())
    for future in futures:
        with pytest.raises(type(error)) as caught:
            future.result()
        assert caught.value is error
    assert runs == [part]  # nothing ran behind it
    with pytest.raises(EngineDeadError, match=type(error).__name__) as dead:
        threaded.check_health()
    assert dead.value.__cause__ is error
    assert len(executor_threads()) == 1  # the thread has survived
    threaded.shutdown()
    with pytest.raises(EngineDeadError, match="not running"):
        threaded.check_health()


def test_without_a_thread_a_failing_step_raises_at_once(tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = make(tiny_llama_dir, 1)

    def fail(self: Worker, output: SchedulerOutput) -> None:
        raise ArithmeticError("bad weights")

    monkeypatch.setattr(Worker, "execute", fail)
    for _ in range(2):
        with pytest.raises(ArithmeticError, match="bad weights"):
            executor.execute_model(step(0))
    with pytest.raises(EngineDeadError, match="bad weights"):
        executor.check_health()
    executor.shutdown()


def test_shutdown_waits_for_the_step_that_runs_and_starts_none_behind_it(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = make(tiny_llama_dir, 3)
    runs: list[int] = []
    is_running, may_end, execute = threading.Event(), threading.Event(), Worker.execute

    def held_back(self: Worker, output: SchedulerOutput) -> None:
        runs.append(output.step)
        is_running.set()
        may_end.wait()
        execute(self, output)

    monkeypatch.setattr(Worker, "execute", held_back)
    futures = []
    for number in range(3):
        futures.append(executor.execute_model(step(number)))
        futures.append(executor.sample_tokens())  # type: ignore[arg-type]
    is_running.wait()
    closer = threading.Thread(target=executor.shutdown)
    closer.start()
    assert executor_threads()
    may_end.set()
    closer.join()
    assert runs == [0]
    futures[0].result()
    with pytest.raises(EngineDeadError, match="shut down before"):
        futures[-1].result()
    assert executor_threads() == []


def test_an_executor_that_failed_gives_its_memory_back(
    threaded: InProcessExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers: list[weakref.ref[Worker]] = []

    def fail(self: Worker, output: SchedulerOutput) -> None:
        workers.append(weakref.ref(self))
        raise ArithmeticError("bad weights")

    monkeypatch.setattr(Worker, "execute", fail)
    threaded.execute_model(step(0))
    threaded.collective_rpc("device_name")  # comes back after the step
    threaded.shutdown()
    gc.collect()
    assert [worker() for worker in workers] == [None]


def test_a_model_that_cannot_be_loaded_leaves_no_thread(tmp_path: Path) -> None:
    executor = InProcessExecutor(ExecutorContext(steps_in_flight=2))
    with pytest.raises(ModelLoadError):
        executor.initialize(EngineConfig(model=ModelConfig(name=str(tmp_path))))
    executor.shutdown()
    assert executor_threads() == []


@pytest.mark.parametrize("engine", ["sync", "overlap"])
def test_the_configured_threads_are_those_that_torch_computes_with(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    before, execute, seen = torch.get_num_threads(), Worker.execute, set()
    wanted = before + 2

    def look(self: Worker, output: SchedulerOutput) -> None:
        seen.add((torch.get_num_threads(), threading.current_thread() is threading.main_thread()))
        execute(self, output)

    monkeypatch.setattr(Worker, "execute", look)
    monkeypatch.setattr(device, "usable_cpus", lambda: set(range(wanted)))
    overrides = ["kv_cache.num_blocks=8", f"executor.num_threads={wanted}"]
    try:
        with LLM(tiny_llama_dir, engine=engine, overrides=overrides) as llm:
            llm.generate("hi", SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
        assert seen == {(wanted, engine == "sync")}
    finally:
        torch.set_num_threads(before)


def test_the_engine_gives_its_memory_back(tiny_llama_dir: Path) -> None:
    with LLM(tiny_llama_dir, overrides=["kv_cache.num_blocks=8"]) as llm:
        assert llm.engine.report.device == "cpu"
        assert llm.engine.num_blocks == 8


@pytest.mark.parametrize(("cache", "head_size"), [("key", 16), ("value", 16)])
def test_a_backend_whose_caches_have_another_size_than_is_counted_is_refused(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, cache: str, head_size: int
) -> None:
    plain = TorchNativeBackend.kv_cache_layout

    def larger(self: TorchNativeBackend, spec: AttentionSpec, num_blocks: int) -> KVCacheLayout:
        layout, more = plain(self, spec, num_blocks), plain(self, spec, num_blocks + 1)
        return replace(layout, **{f"{cache}_shape": getattr(more, f"{cache}_shape")})

    monkeypatch.setattr(TorchNativeBackend, "kv_cache_layout", larger)
    counted, laid_out = 4 * 16 * 2 * head_size, 5 * 16 * 2 * head_size
    said = rf"attention 'torch_native' lays out a {cache} cache of shape .*, {laid_out} elements.*must have {counted}"
    with pytest.raises(PluginError, match=said):
        make(tiny_llama_dir, 1)
