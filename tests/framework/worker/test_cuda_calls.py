"""The classes that call the driver: what they call, in which order, on which stream. torch.cuda is replaced."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from tokenyard.worker.device_memory import CudaMemory, MemoryReading
from tokenyard.worker.graph_recorder import CudaGraphRecorder
from tokenyard.worker.stream import CudaCalls

DEVICE = torch.device("cuda", 0)  # no call reaches it


class Cuda:
    """Stands in for torch.cuda: `log` has what was called, in order; `current` is the stream that work goes to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.log: list[str] = []
        self.streams: list[Stream] = []
        self.current = Stream(self, "main")
        replaced: dict[str, Callable[..., object]] = {
            "graph_pool_handle": lambda: (7, 0),
            "Stream": self.new_stream,
            "CUDAGraph": lambda: Graph(self),
            "Event": lambda: Event(self),
            "current_stream": lambda device: self.current,
            "stream": self.on,
            "graph": self.recording,
            "synchronize": lambda device: self.log.append("synchronize"),
            "empty_cache": lambda: self.log.append("empty_cache"),
            "reset_peak_memory_stats": lambda device: self.log.append("reset_peak"),
            "mem_get_info": lambda device: (3, 10),
            "memory_reserved": lambda device: 5,
            "memory_allocated": lambda device: 4,
            "max_memory_allocated": lambda device: 6,
        }
        for name, function in replaced.items():
            monkeypatch.setattr(torch.cuda, name, function)

    def new_stream(self, device: torch.device) -> Stream:
        assert device == DEVICE
        self.streams.append(Stream(self, f"stream {len(self.streams)}"))
        return self.streams[-1]

    @contextmanager
    def on(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        yield
        self.current = before

    @contextmanager
    def recording(
        self, graph: Graph, *, pool: tuple[int, int], stream: Stream, capture_error_mode: str
    ) -> Iterator[None]:
        self.log.append(f"record {pool} {capture_error_mode}")
        with self.on(stream):
            yield
        self.log.append("recorded")


class Stream:
    def __init__(self, cuda: Cuda, name: str) -> None:
        self._cuda = cuda
        self.name = name

    def wait_stream(self, other: Stream) -> None:
        self._cuda.log.append(f"{self.name} waits for {other.name}")


class Graph:
    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda

    def replay(self) -> None:
        self._cuda.log.append("replay")


class Event:
    def __init__(self, cuda: Cuda) -> None:
        self._log = cuda.log

    def record(self) -> None:
        self._log.append("event")

    def query(self) -> bool:
        self._log.append("ask")
        return False

    def synchronize(self) -> None:
        self._log.append("wait")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    return Cuda(monkeypatch)


def test_graphs_of_one_recorder_are_warmed_up_and_recorded_on_one_stream_in_one_pool(cuda: Cuda) -> None:
    recorder, results = CudaGraphRecorder(DEVICE), [torch.zeros(1) for _ in range(4)]
    left = iter(results)

    def function() -> torch.Tensor:
        cuda.log.append(f"call on {cuda.current.name}")
        return next(left)

    graphs = [recorder.record(function) for _ in range(2)]
    assert len(cuda.streams) == 1
    assert (
        cuda.log
        == [
            "stream 0 waits for main",
            "call on stream 0",
            "main waits for stream 0",
            "synchronize",
            "record (7, 0) thread_local",
            "call on stream 0",
            "recorded",
        ]
        * 2
    )
    cuda.log.clear()
    assert graphs[1].replay() is results[3]  # what was recorded, not what the warm-up gave
    assert cuda.log == ["replay"]


def test_a_mark_is_an_event_behind_what_was_queued(cuda: Cuda) -> None:
    mark = CudaCalls().mark()
    assert cuda.log == ["event"]
    assert mark.is_past() is False
    mark.wait()
    assert cuda.log == ["event", "ask", "wait"]


def test_copies_do_not_wait_and_staged_memory_is_page_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[object] = []

    class Noted(torch.Tensor):
        def copy_(self, other: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            asked.append(non_blocking)
            return super().copy_(other, non_blocking)

    def empty(*shape: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        asked.append((shape, dtype, pin_memory))
        return torch.zeros(*shape, dtype=dtype)

    calls, target = CudaCalls(), torch.zeros(3, dtype=torch.uint8).as_subclass(Noted)
    calls.copy(target, torch.ones(3, dtype=torch.uint8))
    assert target.tolist() == [1, 1, 1]
    monkeypatch.setattr(torch, "empty", empty)
    calls.page_locked(3)
    assert asked == [True, ((3,), torch.uint8, True)]


def test_memory_is_read_and_counted_once_all_that_was_queued_is_done(cuda: Cuda) -> None:
    memory = CudaMemory(DEVICE)
    memory.restart()
    assert cuda.log == ["synchronize", "empty_cache", "reset_peak"]
    cuda.log.clear()
    assert memory.read() == MemoryReading(total=10, free=3, reserved=5, allocated=4, peak=6)
    assert cuda.log == ["synchronize"]
