"""AttentionBackend: paged attention over a K/V cache, one object per worker."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from tokenyard.arrays import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionSpec:
    """What the layers of one KV group ask of a backend. Data types are named as in torch, without the prefix."""

    device_type: str  # cpu, cuda, ...
    dtype: str  # of query, key, value and output: float32, bfloat16, float16
    num_heads: int
    num_kv_heads: int
    head_dim: int  # of query and key
    v_head_dim: int
    block_size: int
    causal: bool = True
    sliding_windows: frozenset[int] = frozenset()  # every window that some layer uses, in tokens; empty = none
    soft_caps: frozenset[float] = frozenset()
    has_sinks: bool = False
    kv_cache_dtype: str = "auto"  # auto = dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class KVCacheLayout:
    """Shapes of the key and the value cache of one layer for a given number of blocks.

    Each has exactly num_blocks * block_size * num_kv_heads * head size elements: memory is counted by that, and a
    worker refuses any other number. Blocks can be copied to host memory where the first dimension of both is
    num_blocks, so that an index is a block.
    """

    key_shape: tuple[int, ...]
    value_shape: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """One step's metadata of one KV group, on the worker's device. N = sequences, T = scheduled tokens.

    Sequence i owns query rows query_start_loc[i] : query_start_loc[i + 1]; they are the last of its seq_lens[i] tokens.
    `query_lens`, `context_lens` and `host_block_table` are the same facts on the host, for plans that are made there
    without waiting for the device.
    """

    query_start_loc: torch.Tensor  # [N + 1] int32
    seq_lens: torch.Tensor  # [N] int32, K/V length after this step's tokens are written
    block_table: torch.Tensor  # [N, max_blocks] int32; entries past the sequence's blocks are arbitrary
    slot_mapping: torch.Tensor  # [T] int64: block id * block_size + offset of each scheduled token; never below 0
    query_lens: Sequence[int]  # [N]
    context_lens: Sequence[int]  # [N] seq_lens on the host
    max_query_len: int
    max_seq_len: int
    host_block_table: IntArray | None = None  # [N, max_blocks] block_table; a runner always gives it (since API 1.4)

    @property
    def num_sequences(self) -> int:
        return len(self.query_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.slot_mapping.shape[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionLayer:
    """What differs from layer to layer.

    `sinks` is the model's own parameter, on the worker's device: as a rule of the model's dtype, it may be of any
    floating one.
    """

    index: int  # position among the model's attention layers
    group: int = 0  # KV group
    scale: float = 1.0  # multiplies q.k
    sliding_window: int | None = None  # a token sees itself and the window - 1 before it
    soft_cap: float | None = None  # cap * tanh(score / cap)
    k_scale: float = 1.0  # of an fp8 cache: stored value * scale = key
    v_scale: float = 1.0
    sinks: torch.Tensor | None = None  # [num_heads] logits that join each softmax's denominator; any floating dtype


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBackendContext:
    """What a backend's factory is given, in the worker process."""

    spec: AttentionSpec
    device: torch.device
    num_threads: int


class AttentionBackend(ABC):
    """Called by the model runner in the worker process: `plan` once a step and KV group, `forward` once a layer.

    The contract is numeric: within the tolerance of the data type, `forward` equals softmax attention in float64 over
    exactly the tokens that the block tables name. K and V of a step are written before anything of the step is read,
    also for a sequence that another sequence of the same step shares blocks with. What unwritten cache slots, unused
    blocks or the tail of a block table contain (NaN included) never reaches the output. Offsets into a cache may exceed
    what 32 bits hold.
    """

    has_lse: ClassVar[bool] = False  # `forward` takes `lse`
    can_capture: ClassVar[bool] = False  # `plan_capture` and what follows may be recorded in a CUDA graph
    # What really runs, where the backend's name does not say it all: told behind the name (since API 1.4).
    description: str = ""

    @classmethod
    @abstractmethod
    def supports(cls, spec: AttentionSpec) -> list[str]:
        """Reasons why this backend cannot serve `spec`; empty = it can. Imports nothing heavy beyond torch."""

    @abstractmethod
    def kv_cache_layout(self, spec: AttentionSpec, num_blocks: int) -> KVCacheLayout:
        """Shapes of the caches; the default layout is NHD, [num_blocks, block_size, num_kv_heads, head_dim] each.

        The runner only allocates them, filled with zeros; what a layout's dimensions mean is the backend's alone.
        """

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> object:
        """Prepare a step; the result is passed to each `forward` of the group in this step and then dropped.

        The plans of all groups of a step are made before its first `forward`, and live at the same time: what one of
        them holds must outlast the next call. `batch` is not to be changed. Copies to the device that the plans of
        earlier steps queued may not be done yet: host memory that they read is not to be written to.
        """

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,  # [T, num_heads, head_dim]
        key: torch.Tensor,  # [T, num_kv_heads, head_dim]
        value: torch.Tensor,  # [T, num_kv_heads, v_head_dim]
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        plan: object,
        out: torch.Tensor,  # [T, num_heads, v_head_dim], written
        lse: torch.Tensor | None = None,  # [T, num_heads] float32, written with natural-log sums when given
    ) -> None:
        """Write `key` and `value` to the cache, attend, and write `out`.

        Heads of query, key and value lie one after the other; the stride from token to token may be larger (views of a
        fused projection). `out` and `lse` are contiguous. `lse` is given only to a backend that says `has_lse`; a
        layer's sinks are part of it.
        """

    def plan_capture(self, batch: AttentionBatch) -> object:
        """A plan whose `forward` calls are recorded in a CUDA graph (since API 1.4); asked if `can_capture`.

        Every sequence of `batch` has one query row. Its tensors keep their addresses for every replay and get new
        contents; `max_seq_len` is the greatest that a replay may have. Each layer's `forward` runs with the plan at
        least once before it is recorded, so what a layer needs may be prepared then.
        """
        return self.plan(batch)

    def update_capture(self, plan: object, batch: AttentionBatch) -> None:
        """Bring what the recorded calls read up to date before a replay (since API 1.4).

        `plan` came from `plan_capture`; `batch` has the same number of sequences, the same tensors with the contents
        of this step, and the host's facts of this step. Nothing to do where a graph reads these tensors alone.
        """
        return
