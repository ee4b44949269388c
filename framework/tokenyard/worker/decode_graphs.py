"""DecodeGraphs: decoding steps replayed from CUDA graphs instead of launched kernel by kernel.

A graph is recorded for each of a few numbers of rows. A step of fewer rows is padded: rows that belong to nobody hold
one token, at the start of the null block, which no request ever has. Recorded kernels read tensors that keep their
addresses; a step writes its inputs into them first.

Legend: N = rows of a graph, B = blocks that the longest sequence can have.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, TypeVar

import numpy as np
import torch

from tokenyard.kv_cache.block_pool import NULL_BLOCK
from tokenyard.worker.input_batch import StepInputs
from tokenyard.worker.packing import Packing
from tokenyard.worker.step_tensors import StepTensors, row_arrays, step_tensors

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tokenyard.arrays import IntArray
    from tokenyard.interfaces.attention import AttentionBackend
    from tokenyard.worker.graph_recorder import Graph, GraphRecorder
    from tokenyard.worker.stream import DeviceStream

IntT = TypeVar("IntT", np.int32, np.int64)

Forward: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Sequence[object]], torch.Tensor]
"""States [N, E] of token ids [N], positions [N] and rows [N] under the attention plans of the KV groups."""

_NULL_SLOT = NULL_BLOCK  # the first of the null block: block 0 of any size begins at slot 0
_FINE, _COARSE, _MOST = 256, 512, 512  # sizes are 8 apart up to here, 16 apart up to there, and none is above


def default_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8th and later every 16th number of rows, and the greatest of a step: at most 512."""
    most = min(max_num_seqs, _MOST)
    sizes = {1, 2, 4, *range(8, _FINE + 1, 8), *range(_FINE, _COARSE + 1, 16), most}
    return tuple(sorted(size for size in sizes if size <= most))


def pad_decodes(inputs: StepInputs, size: int) -> StepInputs:
    """A step whose R rows have one token each, with rows up to `size` that belong to nobody."""
    return replace(
        inputs,
        token_ids=_padded(inputs.token_ids, size, 0),
        positions=_padded(inputs.positions, size, 0),
        query_start=np.arange(size + 1, dtype=np.int32),
        seq_lens=_padded(inputs.seq_lens, size, 1),
        slot_mappings=tuple(_padded(mapping, size, _NULL_SLOT) for mapping in inputs.slot_mappings),
        block_tables=tuple(_padded(table, size, NULL_BLOCK) for table in inputs.block_tables),
    )


def _padded(rows: NDArray[IntT], size: int, value: int) -> NDArray[IntT]:
    """A copy with rows of `value` behind its own."""
    padded = np.full_like(rows, value, shape=(size, *rows.shape[1:]))
    padded[: len(rows)] = rows
    return padded


def _nobody(num_groups: int) -> StepInputs:
    none = np.empty(0, dtype=np.int64)
    return StepInputs(
        token_ids=none,
        positions=none,
        query_start=np.zeros(1, dtype=np.int32),
        seq_lens=np.empty(0, dtype=np.int32),
        block_tables=(np.empty((0, 1), dtype=np.int32),) * num_groups,
        slot_mappings=(none,) * num_groups,
        sampled_rows=none,
        prompt_rows=none,
    )


class _Recorded(NamedTuple):
    packing: Packing  # of the rows' inputs, in the shared buffer
    tensors: StepTensors
    plans: Sequence[object]
    graph: Graph


class DecodeGraphs:
    """Graphs by their number of rows. One runs at a time, so they share the memory of their inputs."""

    def __init__(
        self,
        *,
        forward: Forward,
        backend: AttentionBackend,
        stream: DeviceStream,
        recorder: GraphRecorder,
        device: torch.device,
        num_groups: int,
        max_blocks: int,
        max_seq_len: int,
        sizes: Sequence[int],
    ) -> None:
        self._forward = forward
        self._backend = backend
        self._stream = stream
        self._recorder = recorder
        self._max_seq_len = max_seq_len
        self.sizes = sorted(sizes)
        self._nobody = _nobody(num_groups)
        greatest = self.sizes[-1]
        packing = Packing.of(row_arrays(pad_decodes(self._nobody, greatest)))
        self._buffer = torch.zeros(packing.num_bytes, dtype=torch.uint8, device=device)
        shape = (greatest, max_blocks)
        self._tables = [torch.full(shape, NULL_BLOCK, dtype=torch.int32, device=device) for _ in range(num_groups)]
        self._host_tables: list[IntArray] = [np.full(shape, NULL_BLOCK, dtype=np.int32) for _ in range(num_groups)]
        self._rows = torch.arange(greatest, device=device)
        self._loaded: tuple[Graph, int] | None = None
        self._recorded = {size: self._record(size) for size in reversed(self.sizes)}  # the largest has most memory

    def can_run(self, inputs: StepInputs) -> bool:
        """Whether every row is one token, none asks for prompt logprobs, and there are not too many."""
        num_rows = len(inputs.seq_lens)
        return len(inputs.token_ids) == num_rows <= self.sizes[-1] and not inputs.prompts

    def load(self, inputs: StepInputs) -> None:
        """Write a step's inputs, and the plans' updates, to where its graph reads them."""
        num_rows = len(inputs.seq_lens)
        size = self.sizes[bisect_left(self.sizes, num_rows)]
        recorded = self._recorded[size]
        padded = self._refill(recorded.packing, pad_decodes(inputs, size))
        for plan, batch in zip(recorded.plans, recorded.tensors.batches(padded), strict=True):
            self._backend.update_capture(plan, batch)
        self._loaded = (recorded.graph, num_rows)

    def replay(self) -> torch.Tensor:
        """States [R, E] of the rows of the step that was loaded, valid until the next replay."""
        if self._loaded is None:
            raise RuntimeError("replay() without a step that was loaded and not replayed yet")
        (graph, num_rows), self._loaded = self._loaded, None
        return graph.replay()[:num_rows]

    def _record(self, size: int) -> _Recorded:
        padded = pad_decodes(self._nobody, size)
        packing = Packing.of(row_arrays(padded))
        tensors = step_tensors(packing.tensors(self._buffer), [table[:size] for table in self._tables])
        padded = self._refill(packing, padded)
        plans = [self._backend.plan_capture(batch) for batch in tensors.batches(padded, self._max_seq_len)]
        rows = self._rows[:size]
        graph = self._recorder.record(lambda: self._forward(tensors.token_ids, tensors.positions, rows, plans))
        return _Recorded(packing, tensors, plans, graph)

    def _refill(self, packing: Packing, padded: StepInputs) -> StepInputs:
        """Write a step into the recorded tensors; returns it with tables of the recorded width."""
        self._stream.refill(self._buffer, packing, row_arrays(padded))
        uploaded = self._stream.upload(padded.block_tables)
        size = len(padded.seq_lens)
        for target, host_target, source, host_source in zip(
            self._tables, self._host_tables, uploaded, padded.block_tables, strict=True
        ):
            width = host_source.shape[1]
            target[:size, :width].copy_(source)
            host_target[:size, :width] = host_source
        return replace(padded, block_tables=tuple(table[:size] for table in self._host_tables))
