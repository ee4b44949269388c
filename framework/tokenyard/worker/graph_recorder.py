"""GraphRecorder: records what a function launches on a device, to be replayed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Protocol

import torch


class Graph(Protocol):
    """What was recorded."""

    def replay(self) -> torch.Tensor:
        """Queue it once more: it reads the same tensors, and writes the same result, which is returned."""


class GraphRecorder(ABC):
    """Graphs of one recorder share the memory of what is between their inputs and results."""

    @abstractmethod
    def record(self, function: Callable[[], torch.Tensor]) -> Graph:
        """Run `function` at least once, so that it prepares what it needs, then record it."""


class CudaGraphRecorder(GraphRecorder):
    """CUDA graphs from one memory pool and one stream, as each stream has a workspace of cuBLAS to itself.

    Waits for the device, as recording may not begin behind unfinished work.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def record(self, function: Callable[[], torch.Tensor]) -> Graph:
        self._warm_up(function)
        graph = torch.cuda.CUDAGraph()
        # Other threads of the process, such as another engine's, may use the GPU meanwhile.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            result = function()
        return _CudaGraph(graph, result)

    def _warm_up(self, function: Callable[[], torch.Tensor]) -> None:
        """Not on the current stream, as torch asks for: what is prepared here is not part of the graph."""
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            function()
        current.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)


class _CudaGraph:
    def __init__(self, graph: torch.cuda.CUDAGraph, result: torch.Tensor) -> None:
        self._graph = graph
        self._result = result

    def replay(self) -> torch.Tensor:
        self._graph.replay()
        return self._result
