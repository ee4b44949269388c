"""Paged attention on a CPU by C++ kernels; without a compiler, torch_native in their place.

The cache is HND, K and V apart: [blocks, KV heads, block size, head size]. One call of the library does a layer of a
step: it writes K and V, and attends on torch's own thread pool.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from tokenyard.interfaces import AttentionBackend, KVCacheLayout

from tokenyard_backends.cpu_native.build import BuildError
from tokenyard_backends.cpu_native.cache import load_kernels
from tokenyard_backends.cpu_native.library import Kernels, Layer, Setup, Step, torch_thread_pool
from tokenyard_backends.torch_native.backend import TorchNativeBackend

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray
    from tokenyard.interfaces import AttentionBackendContext, AttentionBatch, AttentionLayer, AttentionSpec

logger = logging.getLogger(__name__)

Cache: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
_ELEMENT_TYPES = {"float32": 0, "bfloat16": 1, "float16": 2}


def make_backend(context: AttentionBackendContext) -> AttentionBackend:
    """The native backend; where its kernels cannot be built, torch_native, which says so."""
    try:
        kernels = load_kernels()
    except BuildError as error:
        logger.warning(
            "attention=cpu_native runs as torch_native: %s; install g++ or clang++ or name a compiler in CXX, "
            "or choose attention=torch_native",
            error,
        )
        fallback = TorchNativeBackend(context)
        fallback.description = f"torch_native: {error}"
        return fallback
    return CpuNativeBackend(context, kernels)


class CpuNativeBackend(AttentionBackend):
    """Runs on every CPU that g++ or clang++ compiles for; log-sum-exp includes a layer's sinks."""

    has_lse = True

    def __init__(self, context: AttentionBackendContext, kernels: Kernels) -> None:
        spec = context.spec
        self._kernels = kernels
        self._num_kv_heads = spec.num_kv_heads
        self._partial_floats = spec.num_heads * (_padded(spec.v_head_dim, kernels.row_elements) + 2)  # of one split
        self._partials = np.empty(0, dtype=np.float32)
        pool = torch_thread_pool() if context.num_threads > 1 else None
        num_threads = 1 if pool is None else context.num_threads
        self._setup = Setup(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            v_head_dim=spec.v_head_dim,
            block_size=spec.block_size,
            element_type=_ELEMENT_TYPES[spec.dtype],
            num_threads=num_threads,
            parallel=pool,
        )
        self._setup.scratch_bytes = kernels.scratch_bytes(self._setup)
        self._scratch = _aligned_bytes(num_threads * self._setup.scratch_bytes)
        self._setup.scratch = self._scratch.ctypes.data
        self.description = f"{kernels.isa}, {num_threads} thread{'s' if num_threads > 1 else ''}"
        if num_threads < context.num_threads:
            self.description += ": torch has no OpenMP runtime to share"

    @classmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        """What torch_native cannot serve it cannot either, so that one can stand in for the other."""
        device = [] if spec.device_type == "cpu" else [f"it runs on a CPU, not on {spec.device_type}"]
        return device + TorchNativeBackend.supports(spec)

    def kv_cache_layout(self, spec: AttentionSpec, num_blocks: int) -> KVCacheLayout:
        rows = (num_blocks, spec.num_kv_heads, spec.block_size)
        return KVCacheLayout(key_shape=(*rows, spec.head_dim), value_shape=(*rows, spec.v_head_dim))

    def plan(self, batch: AttentionBatch) -> StepPlan:
        query_lens = np.asarray(batch.query_lens, dtype=np.int64)
        context_lens = np.asarray(batch.context_lens, dtype=np.int64)
        splits = np.where(query_lens == 1, -(-context_lens // self._kernels.split_tokens), 0)
        ends = splits.cumsum()
        return StepPlan(
            batch=batch,
            order=np.lexsort((-context_lens, query_lens == 1)).astype(np.int32),
            first_split=ends - splits,
            num_kv_heads=self._num_kv_heads,
            partials=self._room_for(int(splits.sum()) * self._partial_floats),
        )

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Cache,
        plan: object,
        out: torch.Tensor,
        lse: torch.Tensor | None = None,
    ) -> None:
        if not isinstance(plan, StepPlan):
            raise TypeError(f"plan must come from this backend's plan(), got {type(plan).__name__}")
        sinks = None if layer.sinks is None else layer.sinks.float().contiguous()
        arguments = Layer(
            query.data_ptr(),
            key.data_ptr(),
            value.data_ptr(),
            kv_cache[0].data_ptr(),
            kv_cache[1].data_ptr(),
            out.data_ptr(),
            None if lse is None else lse.data_ptr(),
            None if sinks is None else sinks.data_ptr(),
            query.stride(0),
            key.stride(0),
            value.stride(0),
            kv_cache[0].shape[0],
            layer.sliding_window or 0,
            layer.scale,
            layer.soft_cap or 0.0,
        )
        self._kernels.attend(self._setup, plan.step, arguments)

    def _room_for(self, num_floats: int) -> NDArray[np.float32]:
        """Shared by all plans, which are used one at a time; a plan keeps the array that it was given."""
        if self._partials.size < num_floats:
            self._partials = np.empty(num_floats, dtype=np.float32)
        return self._partials


class StepPlan:
    """One step as the kernels read it, and the arrays that it points to."""

    def __init__(
        self,
        *,
        batch: AttentionBatch,
        order: NDArray[np.int32],
        first_split: NDArray[np.int64],
        num_kv_heads: int,
        partials: NDArray[np.float32],
    ) -> None:
        num_sequences = batch.num_sequences
        first_task = np.empty(num_sequences + 1, dtype=np.int64)
        finished = np.empty(num_sequences * num_kv_heads, dtype=np.int32)
        table = batch.block_table if batch.block_table.stride(1) == 1 else batch.block_table.contiguous()
        tensors = [tensor.contiguous() for tensor in (batch.query_start_loc, batch.seq_lens, batch.slot_mapping)]
        self._kept = (order, first_split, first_task, finished, partials, table, tensors)
        self.step = Step(
            num_sequences=num_sequences,
            num_tokens=batch.num_tokens,
            table_stride=table.stride(0),
            query_start=tensors[0].data_ptr(),
            seq_lens=tensors[1].data_ptr(),
            block_table=table.data_ptr(),
            slots=tensors[2].data_ptr(),
            order=order.ctypes.data,
            first_split=first_split.ctypes.data,
            first_task=first_task.ctypes.data,
            finished=finished.ctypes.data,
            partials=partials.ctypes.data,
        )


def _padded(head_dim: int, row_elements: int) -> int:
    return -(-head_dim // row_elements) * row_elements


def _aligned_bytes(size: int) -> NDArray[np.uint8]:
    """Untouched memory that starts at a cache line."""
    raw = np.empty(size + 64, dtype=np.uint8)
    offset = -raw.ctypes.data % 64
    return raw[offset : offset + size]
