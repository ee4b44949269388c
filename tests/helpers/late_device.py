"""A device that works behind the host, on CPU tensors: what it sends back is garbage until somebody waits for it."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from tokenyard.interfaces import AttentionBatch, AttentionLayer
from tokenyard.worker.device_memory import DeviceMemory, MemoryReading
from tokenyard.worker.graph_recorder import Graph, GraphRecorder
from tokenyard.worker.stream import QueueCalls
from tokenyard_backends.torch_native.backend import TorchNativeBackend

GARBAGE = 0xA5
CPU = torch.device("cpu")


class LateCalls(QueueCalls):
    """Kernels and uploads run at once, downloads when an event behind them is waited for, or at `catch_up`.

    `log` has what happened in order: "up" and "down" for copies that were queued, "wait" for an event that was waited
    for behind a download that had not arrived. What was uploaded must not be written to before an event behind it,
    unless it is a part of memory that stays: that is read and written in the order of the queue.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self._lock = threading.RLock()  # the engine's thread waits while the worker's goes on
        self._host: dict[int, torch.Tensor] = {}  # by address; kept, so that no address is given out twice
        self._queue: list[tuple[torch.Tensor, torch.Tensor]] = []  # downloads: target, contents
        self._staged: list[tuple[torch.Tensor, torch.Tensor]] = []  # uploads: staged bytes, contents when queued
        self.num_passed = 0
        self.num_marked = 0
        self._waiting: dict[int, int] = {}  # downloads that are in front of each event

    def page_locked(self, num_bytes: int) -> torch.Tensor:
        memory = torch.full((num_bytes,), GARBAGE, dtype=torch.uint8)
        self._host[memory.data_ptr()] = memory
        return memory

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.shape == source.shape
        assert target.dtype == source.dtype == torch.uint8
        with self._lock:
            if self._is_host(target):
                self.log.append("down")
                self._queue.append((target, source.clone()))
                return
            assert self._is_host(source), "an upload from memory that is not page-locked makes the host wait"
            self.log.append("up")
            if source.dim() == 1:
                self._staged.append((source, source.clone()))
            else:
                self._bring(source)
            target.copy_(source)

    def _is_host(self, tensor: torch.Tensor) -> bool:
        address = tensor.data_ptr()
        return any(start <= address < start + len(memory) for start, memory in self._host.items())

    def _bring(self, source: torch.Tensor) -> None:
        """The downloads in the queue that wrote to a part of host memory are in front of an upload from it."""
        start, end = source.data_ptr(), source.data_ptr() + source.numel()
        for target, contents in self._queue:
            if start < target.data_ptr() + target.numel() and target.data_ptr() < end:
                target.copy_(contents)

    def mark(self) -> LateEvent:
        with self._lock:
            self.num_marked += 1
            self._waiting[self.num_marked] = len(self._queue)
            return LateEvent(self, self.num_marked)

    def is_past(self, number: int) -> bool:
        with self._lock:
            return number <= self.num_passed or not self._waiting[number]

    @torch.inference_mode()
    def catch_up(self, number: int | None = None) -> None:
        """All that was queued in front of event `number`, or of the last one, is done."""
        with self._lock:
            number = self.num_marked if number is None else number
            if number > self.num_passed:
                self._catch_up(number)

    def wait(self, number: int) -> None:
        with self._lock:
            if not self.is_past(number):
                self.log.append("wait")
            self.catch_up(number)

    def _catch_up(self, number: int) -> None:
        for staged, contents in self._staged:
            assert torch.equal(staged, contents), "staged memory was written to before it was copied"
        self._staged.clear()
        count = self._waiting[number]
        for target, contents in self._queue[:count]:
            target.copy_(contents)
        del self._queue[:count]
        self._waiting = {later: left - count for later, left in self._waiting.items() if later > number}
        self.num_passed = number


class LateEvent:
    def __init__(self, calls: LateCalls, number: int) -> None:
        self._calls = calls
        self._number = number

    def is_past(self) -> bool:
        return self._calls.is_past(self._number)

    def wait(self) -> None:
        self._calls.wait(self._number)


class CallingGraph:
    """Its result is always the same tensor, as a CUDA graph's is."""

    def __init__(self, function: Callable[[], torch.Tensor], result: torch.Tensor) -> None:
        self._function = function
        self._result = result
        self.num_replays = 0

    def replay(self) -> torch.Tensor:
        self.num_replays += 1
        self._result.copy_(self._function())
        return self._result


class CallingRecorder(GraphRecorder):
    """A graph of it calls the function again, on the tensors that it was recorded with."""

    def __init__(self) -> None:
        self.graphs: list[CallingGraph] = []

    def record(self, function: Callable[[], torch.Tensor]) -> Graph:
        function()
        graph = CallingGraph(function, function())
        self.graphs.append(graph)
        return graph

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)


class FullMemory(DeviceMemory):
    """A GPU of 1000 MiB; `left` are the readings to come, the last one stays."""

    def __init__(self, *readings: MemoryReading) -> None:
        self.left = list(readings)
        self.log: list[str] = []

    def restart(self) -> None:
        self.log.append("restart")

    def read(self) -> MemoryReading:
        self.log.append("read")
        return self.left.pop(0) if len(self.left) > 1 else self.left[0]


class _HeldPlan:
    """The plan of a recorded graph; its batch's tensors are those that it was made for."""

    def __init__(self, batch: AttentionBatch, plan: object) -> None:
        self.batch = batch
        self.plan = plan
        self.num_updates = 0


class RecordableBackend(TorchNativeBackend):
    """torch_native under the protocol of recorded plans, which it checks."""

    can_capture = True

    def plan_capture(self, batch: AttentionBatch) -> object:
        assert list(batch.query_lens) == [1] * batch.num_sequences
        assert batch.host_block_table is not None
        assert batch.host_block_table.shape == tuple(batch.block_table.shape)
        return _HeldPlan(batch, self.plan(batch))

    def update_capture(self, plan: object, batch: AttentionBatch) -> None:
        assert isinstance(plan, _HeldPlan)
        for name in ("query_start_loc", "seq_lens", "block_table", "slot_mapping"):
            old, new = getattr(plan.batch, name), getattr(batch, name)
            assert (new.data_ptr(), new.shape, new.stride()) == (old.data_ptr(), old.shape, old.stride())
        _check_facts(batch)
        assert batch.max_seq_len <= plan.batch.max_seq_len
        plan.num_updates += 1
        plan.plan = self.plan(batch)

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        plan: object,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        plan = plan.plan if isinstance(plan, _HeldPlan) else plan
        super().forward(layer, query, key, value, kv_cache, plan, out, lse)


def _check_facts(batch: AttentionBatch) -> None:
    """The host's facts are those of the tensors."""
    assert batch.seq_lens.tolist() == list(batch.context_lens)
    assert batch.query_start_loc.diff().tolist() == list(batch.query_lens) == [1] * batch.num_sequences
    assert batch.max_seq_len == max(batch.context_lens)
    assert batch.host_block_table is not None
    assert batch.block_table.tolist() == batch.host_block_table.tolist()
