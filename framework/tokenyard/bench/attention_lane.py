"""Lane: one attention backend at one shape, made ready, checked, and then timed a little at a time."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

import torch

from tokenyard.bench.device_time import seconds_on
from tokenyard.interfaces.attention import AttentionLayer
from tokenyard.worker.device import zeros

if TYPE_CHECKING:
    from tokenyard.bench.attention_inputs import AttentionInputs
    from tokenyard.interfaces.attention import AttentionBackend, AttentionSpec

Cache = tuple[torch.Tensor, torch.Tensor]

TOLERANCE = {"float32": 1e-4, "bfloat16": 3e-2, "float16": 4e-3}
"""The error that a correct backend stays below, as a share of the largest value."""


class Timing(NamedTuple):
    """What a lane took, in microseconds."""

    median_us: float  # a layer
    min_us: float
    plan_us: float  # a step
    num_samples: int


def write_caches(
    backend: AttentionBackend, spec: AttentionSpec, inputs: AttentionInputs, num_layers: int, device: torch.device
) -> list[Cache]:
    """K/V caches of so many layers that hold the past, each the same."""
    layout = backend.kv_cache_layout(spec, inputs.num_blocks)

    def allocate() -> Cache:
        return zeros(layout.key_shape, spec.dtype, device), zeros(layout.value_shape, spec.dtype, device)

    first, layer = allocate(), AttentionLayer(index=0, scale=spec.head_dim**-0.5)
    for batch, key, value in inputs.past():
        query = key.repeat_interleave(spec.num_heads // spec.num_kv_heads, 1)
        out = torch.empty(len(key), spec.num_heads, spec.v_head_dim, dtype=key.dtype, device=device)
        backend.forward(layer, query, key, value, first, backend.plan(batch), out)
    others = [allocate() for _ in range(num_layers - 1)]
    for other in others:
        for target, source in zip(other, first, strict=True):
            target.copy_(source)  # whatever a layout's dimensions mean
    return [first, *others]


class Lane:
    """Calls go through the layers one after the other, so that none finds its K/V in the processor's cache.

    On a GPU each sample is a pass over all layers; `is_graph` records one and times its replays.
    """

    def __init__(
        self,
        backend: AttentionBackend,
        spec: AttentionSpec,
        inputs: AttentionInputs,
        caches: Sequence[Cache],
        sliding_window: int | None,
        *,
        is_graph: bool = False,
    ) -> None:
        self._backend = backend
        self._inputs = inputs
        self._caches = caches
        self._layers = [
            AttentionLayer(index=index, scale=spec.head_dim**-0.5, sliding_window=sliding_window)
            for index in range(len(caches))
        ]
        self._device = inputs.query.device
        self._is_graph = is_graph
        self._new = (inputs.new_key, inputs.new_value)
        self._out = torch.full(
            (inputs.shape.num_tokens, spec.num_heads, spec.v_head_dim),
            torch.nan,
            dtype=inputs.query.dtype,
            device=self._device,
        )
        self._next = 0
        self._calls: list[float] = []
        self._plans: list[float] = []
        self._replay: Callable[[], None] | None = None
        self.calls_a_round = len(caches)

    def check(self) -> float:
        """Run once and return the error: a layer, or the graph, which is recorded first."""
        if self._is_graph:
            self._replay = self._record()
            self._replay()
        else:
            self._forward(0, self._backend.plan(self._inputs.batch))
        return self._inputs.error(self._out, self._layers[0])

    def fit(self, seconds: float) -> None:
        """Choose how many calls a round has, so that one takes about `seconds` at most."""
        plan = self._backend.plan(self._inputs.batch)
        took = seconds_on(self._device, lambda: self._forward(0, plan))
        self.calls_a_round = max(1, min(len(self._caches), int(seconds / max(took, 1e-9))))

    def run(self) -> None:
        """A round."""
        if self._replay is not None:
            self._calls.append(seconds_on(self._device, self._replay) / len(self._caches))
            return
        began = perf_counter()
        plan = self._backend.plan(self._inputs.batch)
        self._plans.append(perf_counter() - began)
        if self._device.type == "cuda":
            self._calls.append(seconds_on(self._device, lambda: self._pass(plan)) / self.calls_a_round)
            return
        for _ in range(self.calls_a_round):
            self._calls.append(seconds_on(self._device, lambda: self._forward_next(plan)))

    def timing(self) -> Timing:
        """Of all rounds."""
        plan = statistics.median(self._plans) if self._plans else 0.0
        return Timing(
            round(1e6 * statistics.median(self._calls), 1),
            round(1e6 * min(self._calls), 1),
            round(1e6 * plan, 1),
            len(self._calls),
        )

    def _pass(self, plan: object) -> None:
        for _ in range(self.calls_a_round):
            self._forward_next(plan)

    def _forward_next(self, plan: object) -> None:
        self._forward(self._next, plan)
        self._next = (self._next + 1) % len(self._caches)

    def _forward(self, index: int, plan: object) -> None:
        key, value = self._new
        self._backend.forward(self._layers[index], self._inputs.query, key, value, self._caches[index], plan, self._out)

    def _record(self) -> Callable[[], None]:
        """A CUDA graph of a pass over all layers, as the model runner records one."""
        batch = self._inputs.batch
        plan = self._backend.plan_capture(batch)
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for index in range(len(self._caches)):
                self._forward(index, plan)
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for index in range(len(self._caches)):
                self._forward(index, plan)
        self._out.fill_(torch.nan)

        def replay() -> None:
            self._backend.update_capture(plan, batch)
            graph.replay()

        return replay
