"""A whole engine on a device that works behind it, with graphs and profiled memory: the tokens are a CPU's."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from late_device import CPU, CallingRecorder, FullMemory, LateCalls, RecordableBackend
from tokenyard import LLM, SamplingParams
from tokenyard.config import AttentionConfig, EngineConfig, KVCacheConfig, ModelConfig
from tokenyard.errors import CapacityError, EngineDeadError, PluginError
from tokenyard.executor.inproc import InProcessExecutor
from tokenyard.interfaces import AttentionBatch, ExecutorContext, KVCachePlan
from tokenyard.scheduler_output import HostTransfer, RequestStart, SchedulerOutput, Slot
from tokenyard.worker import worker as worker_module
from tokenyard.worker.accelerator import Accelerator, accelerator_of
from tokenyard.worker.device_memory import MemoryReading
from tokenyard.worker.graph_recorder import Graph, GraphRecorder
from tokenyard.worker.host_blocks import HostBlocks
from tokenyard.worker.logits_processors import LogitsProcessors
from tokenyard.worker.stream import QueuedStream
from tokenyard_backends.torch_native.backend import TorchNativeBackend

MIB = 2**20
SMALL = ["scheduler.max_num_seqs=3", "scheduler.max_num_batched_tokens=40", "kv_cache.num_blocks=24"]
PROMPTS = ["hi", "the hi the", "he said that the", "a b c d e f g", "hi hi hi hi hi hi", "x", "12345 12345"]


def reading(free: int, allocated: int, peak: int) -> MemoryReading:
    return MemoryReading(
        total=1000 * MIB, free=free * MIB, reserved=allocated * MIB, allocated=allocated * MIB, peak=peak * MIB
    )


READINGS = (reading(950, 0, 0), reading(800, 150, 150), reading(780, 150, 170))


class Rig:
    """Stands in for a GPU; `attention=torch_native` is made recordable."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *readings: MemoryReading) -> None:
        self.calls, self.recorder, self.memory = LateCalls(), CallingRecorder(), FullMemory(*(readings or READINGS))
        self._monkeypatch = monkeypatch
        self.put(self.recorder)
        for name in ("can_capture", "plan_capture", "update_capture"):
            monkeypatch.setattr(TorchNativeBackend, name, vars(RecordableBackend)[name])
        plain: Callable[..., None] = TorchNativeBackend.forward

        def forward(self: TorchNativeBackend, *arguments: object) -> None:
            *before, plan, out = arguments
            plain(self, *before, getattr(plan, "plan", plan), out)

        monkeypatch.setattr(TorchNativeBackend, "forward", forward)

    def put(self, recorder: GraphRecorder) -> None:
        stream = QueuedStream(CPU, self.calls)
        found = Accelerator(stream=stream, recorder=recorder, memory=self.memory)
        self._monkeypatch.setattr(worker_module, "accelerator_of", lambda device: found)


@pytest.fixture
def rig(monkeypatch: pytest.MonkeyPatch) -> Rig:
    return Rig(monkeypatch)


def generate(
    folder: Path, params: Sequence[SamplingParams], engine: str, overrides: Sequence[str] = ()
) -> list[list[int]]:
    settings = ["attention=torch_native", *SMALL, *overrides]
    with LLM(folder, engine=engine, overrides=settings, max_model_len=64) as llm:
        outputs = llm.generate(PROMPTS, list(params), use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


PARAMS = {
    "greedy": SamplingParams(temperature=0, max_tokens=14, ignore_eos=True),
    "drawn": SamplingParams(temperature=1.0, top_k=30, max_tokens=14, seed=5),
    "edited": SamplingParams(temperature=0.7, repetition_penalty=1.2, min_tokens=3, max_tokens=14, seed=6),
    "told": SamplingParams(temperature=0, max_tokens=14, logprobs=1),
}
MIXES = {name: [one] * len(PROMPTS) for name, one in PARAMS.items()} | {"mixed": [*PARAMS.values()] * 2}


@pytest.mark.parametrize("params", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("engine", ["sync", "overlap"])
def test_tokens_of_more_requests_than_slots_are_those_of_a_cpu(
    tiny_llama_dir: Path, params: list[SamplingParams], engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slots change hands, and too few blocks make requests give theirs up and start again."""
    params = params[: len(PROMPTS)]
    expected = generate(tiny_llama_dir, params, "sync", ["kv_cache.block_size=4"])
    rig = Rig(monkeypatch)
    assert generate(tiny_llama_dir, params, engine, ["kv_cache.block_size=4"]) == expected
    assert rig.recorder.num_replays > 0


@pytest.mark.parametrize("engine", ["sync", "overlap"])
def test_what_is_swapped_out_comes_back_on_a_device_that_works_behind_the_host(
    tiny_llama_dir: Path, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To host memory the copies are queued behind what was computed before, and back in front of what reads them."""
    tight = ["kv_cache.block_size=4", "kv_cache.num_blocks=12", "kv_cache.enable_prefix_caching=false"]
    swap = ["scheduler.preempt_mode=swap", "kv_cache.host_memory=1MiB"]
    params = [*PARAMS.values(), *PARAMS.values()][: len(PROMPTS)]
    expected = generate(tiny_llama_dir, params, "sync", tight)
    copied: list[bool] = []
    transfer = HostBlocks.transfer

    def noted(blocks: HostBlocks, transfers: Sequence[HostTransfer]) -> None:
        transfer(blocks, transfers)
        copied.extend(one.to_host for one in transfers)

    rig = Rig(monkeypatch)
    monkeypatch.setattr(HostBlocks, "transfer", noted)
    assert generate(tiny_llama_dir, params, engine, [*tight, *swap]) == expected
    assert set(copied) == {True, False}
    assert rig.recorder.num_replays > 0


@pytest.mark.parametrize(("family", "can_record"), [("mistral", True), ("gemma3_text", False)])
def test_models_with_windows_run_with_graphs_where_their_decoder_allows_it(
    family: str, can_record: bool, window_model: Callable[[str], Path], rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    folder, params = window_model(family), [PARAMS["greedy"]] * len(PROMPTS)
    found = generate(folder, params, "overlap", ["kv_cache.num_blocks=200"])
    assert (rig.recorder.num_replays > 0) is can_record
    assert ("no CUDA graphs: the adapter (Gemma3ForCausalLM) may wait for the GPU" in caplog.text) is not can_record
    assert found == generate(folder, params, "sync", ["kv_cache.num_blocks=200", "executor.enforce_eager=true"])


def test_the_start_tells_how_many_graphs_there_are_and_what_they_take(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    rig = Rig(monkeypatch, reading(500, 100, 100), reading(488, 100, 100))
    with LLM(tiny_llama_dir, overrides=["attention=torch_native", *SMALL]):
        assert [graph.num_replays for graph in rig.recorder.graphs] == [0, 0, 0]
    assert "3 CUDA graphs of up to 3 rows" in caplog.text
    assert "12 MiB" in caplog.text


@pytest.mark.parametrize(
    ("override", "sizes"), [("executor.cudagraph_capture_sizes=[2]", 1), ("executor.enforce_eager=true", 0)]
)
def test_settings_say_which_graphs_are_recorded(
    tiny_llama_dir: Path, rig: Rig, override: str, sizes: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with LLM(tiny_llama_dir, overrides=["attention=torch_native", *SMALL, override]):
        assert len(rig.recorder.graphs) == sizes
    assert ("no CUDA graphs: executor.enforce_eager=true" in caplog.text) is (sizes == 0)


def test_a_backend_that_cannot_be_recorded_runs_without_graphs_and_that_is_told(
    tiny_llama_dir: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(TorchNativeBackend, "can_capture", False)
    with LLM(tiny_llama_dir, overrides=["attention=torch_native", *SMALL]):
        assert not rig.recorder.graphs
    assert "no CUDA graphs: attention 'torch_native' cannot be recorded" in caplog.text


def test_a_slot_goes_from_a_greedy_request_to_one_whose_penalties_read_its_tokens(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in flight for the first must not be told of the second."""
    edited = SamplingParams(temperature=0, max_tokens=14, ignore_eos=True, repetition_penalty=1.5, presence_penalty=1.0)
    params = [edited if index % 2 else PARAMS["greedy"] for index in range(len(PROMPTS))]
    one_slot = ["scheduler.max_num_seqs=1"]
    expected = generate(tiny_llama_dir, params, "sync", one_slot)
    Rig(monkeypatch)
    assert generate(tiny_llama_dir, params, "overlap", one_slot) == expected


@pytest.mark.parametrize("overrides", [[], ["executor.enforce_eager=true"]], ids=["graphs", "eager"])
def test_both_kinds_of_step_go_through_the_backend_at_the_start_before_graphs(
    tiny_llama_dir: Path, rig: Rig, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[list[int], int]] = []
    plan = TorchNativeBackend.plan

    def noted(self: TorchNativeBackend, batch: AttentionBatch) -> object:
        seen.append((list(batch.query_lens), len(rig.recorder.graphs)))
        return plan(self, batch)

    monkeypatch.setattr(TorchNativeBackend, "plan", noted)
    with LLM(tiny_llama_dir, overrides=["attention=torch_native", *SMALL, *overrides]):
        assert seen[:2] == [([1, 1], 0), ([16, 1], 0)]
        assert len(rig.recorder.graphs) == (0 if overrides else 3)


@pytest.mark.parametrize("kind", [[1, 1], [16, 1]], ids=["decoding", "mixed"])
def test_a_kind_of_step_that_does_not_fit_ends_the_start(
    tiny_llama_dir: Path, rig: Rig, kind: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = TorchNativeBackend.plan

    def fail(self: TorchNativeBackend, batch: AttentionBatch) -> object:
        if list(batch.query_lens) == kind:
            raise torch.OutOfMemoryError("no memory\nmore")
        return plan(self, batch)

    monkeypatch.setattr(TorchNativeBackend, "plan", fail)
    with pytest.raises(CapacityError, match=r"a small step behind 64 tokens .* beside the K/V cache.*\(no memory\)$"):
        LLM(tiny_llama_dir, overrides=["attention=torch_native", *SMALL], max_model_len=64)


class FailingRecorder(GraphRecorder):
    def __init__(self, error: Exception) -> None:
        self._error = error

    def record(self, function: Callable[[], torch.Tensor]) -> Graph:
        raise self._error


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (torch.OutOfMemoryError("no memory\nmore"), CapacityError, r"do not fit .*\(no memory\).*enforce_eager=true"),
        (RuntimeError("not permitted\nmore"), PluginError, r"'torch_native' .*\(not permitted\).*enforce_eager=true"),
    ],
)
def test_a_failure_to_record_is_one_line_that_says_how_to_do_without(
    tiny_llama_dir: Path, rig: Rig, error: Exception, expected: type[Exception], words: str
) -> None:
    rig.put(FailingRecorder(error))
    with pytest.raises(expected, match=words):
        LLM(tiny_llama_dir, overrides=["attention=torch_native", *SMALL])


class _Recording:
    """Ends as torch.cuda.graph does when what it recorded failed."""

    def __enter__(self) -> None:
        pass

    def __exit__(self, *raised: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")


class FailingInsideRecorder(FailingRecorder):
    def record(self, function: Callable[[], torch.Tensor]) -> Graph:
        with _Recording():
            return super().record(function)


@pytest.mark.parametrize(
    ("error", "expected", "words"),
    [
        (torch.OutOfMemoryError("no memory"), CapacityError, r"do not fit .*\(no memory\)"),
        (RuntimeError("Tensor.item() is not permitted"), PluginError, r"\(Tensor.item\(\) is not permitted\)"),
        (ValueError("no such tile"), PluginError, r"\(no such tile\)"),
    ],
)
def test_a_failure_inside_a_recording_is_told_and_not_what_torch_makes_of_it(
    tiny_llama_dir: Path, rig: Rig, error: Exception, expected: type[Exception], words: str
) -> None:
    rig.put(FailingInsideRecorder(error))
    with pytest.raises(expected, match=words):
        LLM(tiny_llama_dir, overrides=["attention=torch_native", *SMALL])


def test_the_cache_gets_what_the_largest_step_leaves_of_the_share(tiny_llama_dir: Path, rig: Rig) -> None:
    overrides = ["attention=torch_native", "scheduler.max_num_seqs=4", "scheduler.max_num_batched_tokens=80"]
    with LLM(tiny_llama_dir, overrides=overrides, gpu_memory_utilization=0.5) as llm:
        report = llm.engine.report
    graphs = 20 * MIB * 4 // 80  # of four rows
    outside = 20 * MIB  # came into use between the first reading and the last
    assert report.available_bytes == 500 * MIB - 170 * MIB - graphs - outside
    assert rig.memory.log[:6] == ["restart", "read", "restart", "read", "read", "restart"]


def test_memory_that_others_hold_stops_the_start_before_the_model_is_loaded(
    tiny_llama_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Rig(monkeypatch, reading(300, 0, 0))
    monkeypatch.setattr(worker_module, "load_model", lambda *arguments, **keywords: pytest.fail("it was loaded"))
    with pytest.raises(CapacityError, match=r"only 0\.29 GiB are free"):
        LLM(tiny_llama_dir, overrides=["attention=torch_native"])


def test_weights_that_do_not_fit_are_told_in_one_line(
    tiny_llama_dir: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object, **keywords: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory\nadvice")

    monkeypatch.setattr(worker_module, "load_model", fail)
    with pytest.raises(CapacityError, match=r"weights of .* do not fit .*\(CUDA out of memory\)"):
        LLM(tiny_llama_dir, overrides=["attention=torch_native"])


@pytest.mark.parametrize("engine", ["sync", "overlap"])
def test_a_device_that_fails_behind_the_host_ends_the_engine(
    tiny_llama_dir: Path, rig: Rig, engine: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with LLM(tiny_llama_dir, engine=engine, overrides=["attention=torch_native", *SMALL]) as llm:

        def fail(number: int | None = None) -> None:
            raise RuntimeError("an illegal memory access was encountered")

        monkeypatch.setattr(rig.calls, "catch_up", fail)
        for _ in range(2):
            with pytest.raises(EngineDeadError, match="illegal memory access"):
                llm.generate("hi", PARAMS["greedy"], use_tqdm=False)


def test_steps_behind_one_that_failed_on_the_device_raise_what_it_raised(
    tiny_llama_dir: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those before it are as they were."""
    executor = InProcessExecutor(ExecutorContext(steps_in_flight=2))
    model, attention = ModelConfig(name=str(tiny_llama_dir)), AttentionConfig(name="torch_native")
    executor.initialize(EngineConfig(model=model, attention=attention, kv_cache=KVCacheConfig(num_blocks=3)))
    executor.allocate_kv_cache(KVCachePlan(num_blocks=4, block_size=16))
    futures = []
    for number in range(3):
        executor.execute_model(one_request(number))
        futures.append(executor.sample_tokens())
        if number == 1:
            futures[0].result()
            executor.collective_rpc("device_name")  # comes back when the worker has launched both

            def fail(number: int | None = None) -> None:
                raise RuntimeError("an illegal memory access was encountered")

            monkeypatch.setattr(rig.calls, "catch_up", fail)
    assert futures[0].result().step == 0
    with pytest.raises(RuntimeError, match="illegal memory access"):
        futures[1].result()
    with pytest.raises(EngineDeadError, match="illegal memory access"):
        executor.check_health()
    executor.execute_model(one_request(3))
    with pytest.raises(RuntimeError, match="illegal memory access"):
        executor.sample_tokens().result()
    executor.shutdown()


def one_request(number: int) -> SchedulerOutput:
    """Step 0 computes a prompt of three tokens, each later one the token before it."""
    start = RequestStart(
        request_id="a",
        slot=Slot(0, 1),
        token_ids=np.array([5, 6, 7], dtype=np.int32),
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=(np.array([1, 2], dtype=np.int32),),
        params=PARAMS["greedy"],
    )
    return SchedulerOutput(
        step=number,
        new=() if number else (start,),
        slots=np.zeros(1, dtype=np.int64),
        generations=np.ones(1, dtype=np.int32),
        num_computed_tokens=np.array([2 + number if number else 0], dtype=np.int32),
        num_scheduled_tokens=np.array([1 if number else 3], dtype=np.int32),
        samples=np.ones(1, dtype=np.bool_),
    )


def test_logits_processors_are_not_asked_about_the_profiled_step(
    tiny_llama_dir: Path, rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LogitsProcessors, "start", lambda self, start: self._processors and pytest.fail("asked"))
    overrides = ["attention=torch_native", "scheduler.max_num_seqs=4", "scheduler.max_num_batched_tokens=80"]
    with LLM(tiny_llama_dir, overrides=[*overrides, "logits_processors=[no_repeat_ngram]"]):
        pass


def test_sizes_of_graphs_are_not_used_on_a_cpu_and_that_is_told(
    tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert accelerator_of(CPU) is None
    with LLM(tiny_llama_dir, overrides=[*SMALL, "executor.cudagraph_capture_sizes=[1,2]"]):
        pass
    assert "cudagraph_capture_sizes is not used on a CPU" in caplog.text
