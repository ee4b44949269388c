"""What a step's layers run: kernels, planned when the first layer of a kind asks and kept for the others.

Legend: N = sequences, T = query rows, H = query heads, D = head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from tokenyard_backends.flashinfer.kernels import (
    Cache,
    CapturedDecodeKernel,
    CaptureSpace,
    DecodeKernel,
    Kernel,
    KernelSettings,
    LayerKind,
    PrefillKernel,
)
from tokenyard_backends.flashinfer.metadata import (
    HostBatch,
    PageTensors,
    max_pages,
    num_shared_blocks,
    pages_of,
    prefix_pages,
    to_tensors,
)

if TYPE_CHECKING:
    from tokenyard.interfaces import AttentionBatch

    from tokenyard_backends.flashinfer.library import Library


class Attention(Protocol):
    """A planned kernel, or several."""

    def run(self, query: torch.Tensor, kv_cache: Cache, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """As Kernel.run."""


@dataclass(frozen=True, slots=True)
class CascadeAttention:
    """A prefix that all sequences share, read once, and the rest of each; merged by their log-sum-exps."""

    library: Library
    prefix: Kernel
    rest: Kernel

    def run(self, query: torch.Tensor, kv_cache: Cache, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if lse is None else lse
        prefix_out, prefix_lse = torch.empty_like(out), torch.empty_like(lse)
        self.rest.run(query, kv_cache, out, lse)
        self.prefix.run(query, kv_cache, prefix_out, prefix_lse)
        self.library.merge_state_in_place(out, lse, prefix_out, prefix_lse)


class KernelPool:
    """The kernels of one backend, made on demand: a wrapper holds 8 MiB on the device and as much pinned memory."""

    def __init__(self, settings: KernelSettings) -> None:
        self.settings = settings
        self._decode: dict[LayerKind, Kernel] = {}
        self._prefill: dict[LayerKind, Kernel] = {}
        self._prefix: dict[LayerKind, Kernel] = {}
        self._capture_spaces: dict[LayerKind, CaptureSpace] = {}

    def sequences(self, kind: LayerKind, *, is_decode: bool) -> Kernel:
        """For each sequence's own pages."""
        kernels = self._decode if is_decode else self._prefill
        if kind not in kernels:
            kernels[kind] = DecodeKernel(self.settings) if is_decode else PrefillKernel(self.settings)
        return kernels[kind]

    def prefix(self, kind: LayerKind) -> Kernel:
        """For pages that all sequences share."""
        if kind not in self._prefix:
            self._prefix[kind] = PrefillKernel(self.settings, causal=False)
        return self._prefix[kind]

    def capture(self, kind: LayerKind, num_sequences: int, num_page_ids: int) -> Kernel:
        """A new kernel for a CUDA graph. The buffers are those of earlier graphs of the kind if they are large enough,
        else new ones; the earlier graphs keep theirs."""
        space = self._capture_spaces.get(kind)
        if space is None or not space.has_room_for(num_sequences, num_page_ids):
            space = CaptureSpace.allocate(num_sequences, num_page_ids, self.settings.device)
            self._capture_spaces[kind] = space
        return CapturedDecodeKernel(self.settings, space, num_sequences)


class Plan(ABC):
    """What `plan` and `plan_capture` of the backend return."""

    slots: torch.Tensor  # [T] int64, where the step's K/V rows go

    @abstractmethod
    def attention(self, kind: LayerKind) -> Attention:
        """Planned for the step."""


class StepPlan(Plan):
    """One step of one KV group. Its kernels may have served another step in the meantime: then they are planned again.

    `cascade_min_blocks`: shared blocks from which on they are read once; None = never.
    """

    def __init__(self, pool: KernelPool, batch: AttentionBatch, cascade_min_blocks: int | None) -> None:
        self.slots = batch.slot_mapping
        self._pool = pool
        self._host = HostBatch.of(batch)
        self._pages: dict[int | None, PageTensors] = {}  # by window
        self._shared_blocks = 0
        if cascade_min_blocks is not None and batch.num_sequences > 1:
            shared = num_shared_blocks(self._host, pool.settings.block_size)
            self._shared_blocks = shared if shared >= cascade_min_blocks else 0

    def attention(self, kind: LayerKind) -> Attention:
        kernel = self._pool.sequences(kind, is_decode=self._host.is_decode)
        if kernel.owner is not self:
            kernel.plan(self._pages_of(kind.window), kind)
            kernel.owner = self
        if not self._cascades(kind.window):
            return kernel
        return CascadeAttention(self._pool.settings.library, self._prefix(kind), kernel)

    def _cascades(self, window: int | None) -> bool:
        return self._shared_blocks > 0 and window is None  # most of a windowed layer's queries see no prefix

    def _prefix(self, kind: LayerKind) -> Kernel:
        kernel = self._pool.prefix(kind)
        if kernel.owner is not self:
            pages = prefix_pages(self._host, self._pool.settings.block_size, self._shared_blocks)
            kernel.plan(to_tensors(pages, self._pool.settings.device), kind)
            kernel.owner = self
        return kernel

    def _pages_of(self, window: int | None) -> PageTensors:
        if window not in self._pages:
            skipped = self._shared_blocks if self._cascades(window) else 0
            settings = self._pool.settings
            pages = pages_of(self._host, settings.block_size, window=window, skipped_blocks=skipped)
            self._pages[window] = to_tensors(pages, settings.device)
        return self._pages[window]


class CapturePlan(Plan):
    """Decoding steps of N sequences whose launches are in a CUDA graph; `update` plans them for the next replay."""

    def __init__(self, pool: KernelPool, batch: AttentionBatch) -> None:
        self.slots = batch.slot_mapping
        self._pool = pool
        self._host = HostBatch.of(batch)
        self._max_context_len = batch.max_seq_len
        self._kernels: dict[LayerKind, Kernel] = {}

    def attention(self, kind: LayerKind) -> Attention:
        if kind not in self._kernels:
            num_sequences = len(self._host.query_lens)
            most = max_pages(self._max_context_len, self._pool.settings.block_size, kind.window)
            kernel = self._pool.capture(kind, num_sequences, num_sequences * most)
            self._plan(kind, kernel)
            self._kernels[kind] = kernel
        return self._kernels[kind]

    def update(self, batch: AttentionBatch) -> None:
        self._host = HostBatch.of(batch)
        for kind, kernel in self._kernels.items():
            self._plan(kind, kernel)

    def _plan(self, kind: LayerKind, kernel: Kernel) -> None:
        settings = self._pool.settings
        pages = pages_of(self._host, settings.block_size, window=kind.window)
        kernel.plan(to_tensors(pages, settings.device), kind)
