"""FlashInfer's wrappers: each planned for a step and a kind of layer, then run by every layer of that kind.

A wrapper keeps the plan in buffers of its own, so layers that differ in what the plan holds need wrappers of their own.
All of them share one work space for partial results, since only one runs at a time.

Legend: N = sequences, T = query rows, H / HK = query / KV heads, D = head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch
from tokenyard.errors import ConfigError

if TYPE_CHECKING:
    from tokenyard.interfaces import AttentionLayer

    from tokenyard_backends.flashinfer.library import DecodeWrapper, Library, PrefillWrapper
    from tokenyard_backends.flashinfer.metadata import PageTensors

Cache: TypeAlias = "tuple[torch.Tensor, torch.Tensor]"
_LAYOUT = "NHD"


class LayerKind(NamedTuple):
    """What a plan depends on, besides the step."""

    group: int  # KV group: its own block table
    window: int | None
    soft_cap: float | None
    scale: float

    @classmethod
    def of(cls, layer: AttentionLayer) -> LayerKind:
        return cls(layer.group, layer.sliding_window, layer.soft_cap, layer.scale)

    @property
    def window_left(self) -> int:
        """Tokens seen before a query's own; FlashInfer's -1 = all."""
        return -1 if self.window is None else self.window - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelSettings:
    """What all wrappers of a backend have in common."""

    library: Library
    device: torch.device
    workspace: torch.Tensor  # zeros: some of FlashInfer's kernels count in it
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    prefill_backend: str  # auto, fa2, fa3
    decode_tensor_cores: bool


class Kernel(ABC):
    """One wrapper. `run` uses the latest plan; `owner` is the step that made it."""

    _wrapper: DecodeWrapper | PrefillWrapper

    def __init__(self, settings: KernelSettings) -> None:
        self._settings = settings
        is_cuda = settings.device.type == "cuda"
        self._planned = torch.cuda.Event() if is_cuda else None  # type: ignore[no-untyped-call]
        self.owner: object | None = None

    def plan(self, pages: PageTensors, kind: LayerKind) -> None:
        """Raises ConfigError where the work space is too small or a kernel cannot be compiled."""
        if self._planned is not None:
            self._planned.synchronize()  # the wrapper writes plans to one pinned buffer: the last one must be across
        self.owner = None
        try:
            self._plan(pages, kind)
        except (RuntimeError, OSError) as error:
            if advice := _advice(str(error)):
                raise ConfigError(f"attention 'flashinfer': {advice}") from error
            raise
        if self._planned is not None:
            self._planned.record()

    @abstractmethod
    def _plan(self, pages: PageTensors, kind: LayerKind) -> None: ...

    def run(self, query: torch.Tensor, kv_cache: Cache, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Attend `query` [T, H, D]; write `out` [T, H, D] and, when given, `lse` [T, H] float32 in base 2."""
        self._wrapper.run(query, kv_cache, out=out, lse=lse, return_lse=lse is not None)


class PrefillKernel(Kernel):
    """Any number of query rows a sequence; without `causal`, every row sees all keys."""

    _wrapper: PrefillWrapper

    def __init__(self, settings: KernelSettings, *, causal: bool = True) -> None:
        super().__init__(settings)
        self._causal = causal
        with torch.inference_mode(False):  # FlashInfer writes to its buffers in and out of inference mode
            self._wrapper = settings.library.BatchPrefillWithPagedKVCacheWrapper(
                settings.workspace, _LAYOUT, backend=settings.prefill_backend
            )

    def _plan(self, pages: PageTensors, kind: LayerKind) -> None:
        settings = self._settings
        self._wrapper.plan(
            pages.query_start,
            pages.page_start,
            pages.page_ids,
            pages.last_page_len,
            settings.num_heads,
            settings.num_kv_heads,
            settings.head_dim,
            settings.block_size,
            causal=self._causal,
            window_left=kind.window_left,
            logits_soft_cap=kind.soft_cap,
            q_data_type=settings.dtype,
            kv_data_type=settings.dtype,
            o_data_type=settings.dtype,
            sm_scale=kind.scale,
        )


class DecodeKernel(Kernel):
    """One query row a sequence."""

    _wrapper: DecodeWrapper

    def __init__(self, settings: KernelSettings) -> None:
        super().__init__(settings)
        with torch.inference_mode(False):
            self._wrapper = self._make_wrapper()

    def _make_wrapper(self) -> DecodeWrapper:
        return self._settings.library.BatchDecodeWithPagedKVCacheWrapper(
            self._settings.workspace, _LAYOUT, use_tensor_cores=self._settings.decode_tensor_cores, backend="fa2"
        )

    def _plan(self, pages: PageTensors, kind: LayerKind) -> None:
        settings = self._settings
        self._wrapper.plan(
            pages.page_start,
            pages.page_ids,
            pages.last_page_len,
            settings.num_heads,
            settings.num_kv_heads,
            settings.head_dim,
            settings.block_size,
            window_left=kind.window_left,
            logits_soft_cap=kind.soft_cap,
            q_data_type=settings.dtype,
            kv_data_type=settings.dtype,
            o_data_type=settings.dtype,
            sm_scale=kind.scale,
        )


@dataclass(frozen=True, slots=True)
class CaptureSpace:
    """Buffers whose addresses CUDA graphs keep. Graphs share them: each is planned again before its replay."""

    page_ids: torch.Tensor  # int32
    int_workspace: torch.Tensor  # uint8

    @classmethod
    def allocate(cls, num_sequences: int, num_page_ids: int, device: torch.device) -> CaptureSpace:
        with torch.inference_mode(False):
            return cls(
                page_ids=torch.zeros(num_page_ids, dtype=torch.int32, device=device),
                int_workspace=torch.zeros(_plan_bytes(num_sequences), dtype=torch.uint8, device=device),
            )

    def has_room_for(self, num_sequences: int, num_page_ids: int) -> bool:
        return len(self.page_ids) >= num_page_ids and len(self.int_workspace) >= _plan_bytes(num_sequences)


def _plan_bytes(num_sequences: int) -> int:
    """Room for a decoding plan. It has 13 bytes a thread block and 8 a sequence, and at most a few blocks a sequence or
    32 a multiprocessor; a wrapper's own 8 MiB for each of a few dozen graphs would add up."""
    return (1 << 20) + 1024 * num_sequences


class CapturedDecodeKernel(DecodeKernel):
    """One query row a sequence, N fixed; what its recorded launches read stays where it is."""

    def __init__(self, settings: KernelSettings, space: CaptureSpace, num_sequences: int) -> None:
        self._space = space
        self._num_sequences = num_sequences
        super().__init__(settings)

    def _make_wrapper(self) -> DecodeWrapper:
        settings, size = self._settings, self._num_sequences
        wrapper = settings.library.BatchDecodeWithPagedKVCacheWrapper(
            settings.workspace,
            _LAYOUT,
            use_cuda_graph=True,
            use_tensor_cores=settings.decode_tensor_cores,
            paged_kv_indptr_buffer=torch.zeros(size + 1, dtype=torch.int32, device=settings.device),
            paged_kv_indices_buffer=self._space.page_ids,
            paged_kv_last_page_len_buffer=torch.zeros(size, dtype=torch.int32, device=settings.device),
            backend="fa2",
        )
        wrapper.reset_workspace_buffer(settings.workspace, self._space.int_workspace)
        return wrapper


def _advice(message: str) -> str | None:
    """What to do about an error of FlashInfer's `plan`, in one line; None where nothing is known."""
    first_line = message.strip().partition("\n")[0]
    if "AlignedAllocator" in message:
        return f"its work space is too small ({first_line}); raise attention.workspace_mib"
    if any(word in message for word in ("nvcc", "ninja", "Ninja", "JIT")):
        return (
            f"a kernel cannot be compiled ({first_line}); install the CUDA toolkit of torch's CUDA version, or the "
            "package flashinfer-jit-cache of FlashInfer's own version"
        )
    return None
