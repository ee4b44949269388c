"""torch's variable-length attention over pages, for a GPU and for layers that need no scores in hand.

`torch.nn.attention.varlen.varlen_attn` (FlashAttention) takes block tables in newer releases. Which page sizes and
windows a build of torch really serves, and whether what unwritten slots contain gets through, is documented nowhere: so
it is tried once on the device, on a small step whose result is known, before it is used.

Legend: T = tokens of the step, N = sequences, L = K/V rows of a sequence, H / HK = query / KV heads, D = head size.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, cast

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tokenyard.interfaces import AttentionBackendContext, AttentionBatch, AttentionSpec

_NEEDED = frozenset({"scale", "window_size", "enable_gqa", "seqused_k", "block_table"})
_MAX_HEAD_DIM = 256
_TOLERANCE = 2e-2  # of outputs of about 1 in bfloat16
_TRIAL_WINDOW = 40
_TRIAL_LENGTH = 300  # more than the keys that a kernel takes at a time


class VarlenAttention(Protocol):
    """What is used of `varlen_attn`."""

    def __call__(
        self,
        query: torch.Tensor,  # [T, H, D]
        key: torch.Tensor,  # [blocks, block size, HK, D]
        value: torch.Tensor,
        cu_seq_q: torch.Tensor,  # [N + 1] int32
        cu_seq_k: torch.Tensor,  # [N + 1] int32
        max_q: int,
        max_k: int,
        *,
        scale: float,
        window_size: tuple[int, int],
        enable_gqa: bool,
        seqused_k: torch.Tensor,  # [N] int32
        block_table: torch.Tensor,  # [N, blocks of the longest] int32
    ) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class VarlenStep:
    """A step as `varlen_attn` wants it."""

    query_starts: torch.Tensor
    key_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    max_query_len: int
    max_seq_len: int


def varlen_step(batch: AttentionBatch, block_size: int) -> VarlenStep:
    """Nothing of it waits for the device. Behind a sequence's own blocks a kernel may look: block 0 is always there."""
    key_starts = torch.zeros_like(batch.query_start_loc)
    torch.cumsum(batch.seq_lens, 0, dtype=key_starts.dtype, out=key_starts[1:])
    positions = torch.arange(batch.block_table.shape[1], device=batch.block_table.device) * block_size
    return VarlenStep(
        query_starts=batch.query_start_loc,
        key_starts=key_starts,
        seq_lens=batch.seq_lens,
        block_table=batch.block_table.masked_fill(positions >= batch.seq_lens[:, None], 0),
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class PagedVarlen:
    """`varlen_attn`, for layers without a window, and with one where `has_windows`."""

    function: VarlenAttention
    has_windows: bool

    def serves(self, window: int | None) -> bool:
        return window is None or self.has_windows

    def attend(
        self,
        query: torch.Tensor,
        kv_cache: tuple[torch.Tensor, torch.Tensor],
        step: VarlenStep,
        *,
        scale: float,
        window: int | None,
    ) -> torch.Tensor:
        """Causal attention of the step's rows [T, H, D] over what the block tables name: [T, H, D]."""
        key, value = kv_cache
        return self.function(
            query,
            key,
            value,
            step.query_starts,
            step.key_starts,
            step.max_query_len,
            step.max_seq_len,
            scale=scale,
            window_size=(-1 if window is None else window - 1, 0),  # tokens before the row's own, and after it
            enable_gqa=query.shape[1] != key.shape[2],
            seqused_k=step.seq_lens,
            block_table=step.block_table,
        )


def find_varlen(context: AttentionBackendContext) -> tuple[PagedVarlen | None, str]:
    """`varlen_attn` where it serves the layers of `context.spec` on its device, and what to tell of it.

    None without a word where nobody would expect it: not on a GPU. Runs a small step on the device.
    """
    spec = context.spec
    if spec.device_type != "cuda":
        return None, ""
    function = _varlen_attn()
    if reason := _static_reason(spec, function):
        return None, f"gathered pages; not varlen_attn: {reason}"
    varlen = PagedVarlen(function=cast("VarlenAttention", function), has_windows=bool(spec.sliding_windows))
    if reason := _trial_reason(context, varlen, None):
        return None, f"gathered pages; not varlen_attn: {reason}"
    gathered = [*(["soft caps"] if spec.soft_caps else []), *(["sinks"] if spec.has_sinks else [])]
    if varlen.has_windows and (reason := _trial_reason(context, varlen, _TRIAL_WINDOW)):
        varlen = replace(varlen, has_windows=False)
        gathered.append(f"windows ({reason})")
    return varlen, f"varlen_attn; gathered pages for {', '.join(gathered)}" if gathered else "varlen_attn"


def _varlen_attn() -> Callable[..., object] | None:
    try:
        from torch.nn.attention import varlen  # which not every release has
    except ImportError:
        return None
    return varlen.varlen_attn


def _static_reason(spec: AttentionSpec, function: Callable[..., object] | None) -> str:
    """Why it cannot be, as far as that is known without trying; empty = it may."""
    if spec.dtype not in ("float16", "bfloat16"):
        return f"it has no {spec.dtype}"
    if spec.head_dim != spec.v_head_dim or spec.head_dim > _MAX_HEAD_DIM:
        return f"it has no heads of {spec.head_dim} with values of {spec.v_head_dim}"
    missing = _NEEDED if function is None else _NEEDED - set(inspect.signature(function).parameters)
    return f"that of torch {torch.__version__} takes no {', '.join(sorted(missing))}" if missing else ""


def _trial_reason(context: AttentionBackendContext, varlen: PagedVarlen, window: int | None) -> str:
    """Why a step of which the result is known did not give it; empty = it did."""
    trial = _Trial(context, window)
    scale = context.spec.head_dim**-0.5
    try:
        found = varlen.attend(trial.query, trial.kv_cache, trial.step, scale=scale, window=window).float()
    except (RuntimeError, ValueError, TypeError) as error:
        message = str(error).strip().splitlines()
        return f"{type(error).__name__}: {message[0] if message else ''}"
    if not bool(found.isfinite().all()):
        return "what unwritten slots contain gets through"
    difference = float((found - trial.expected(scale)).abs().max())
    return "" if difference <= _TOLERANCE else f"it is off by {difference:.2g}"


class _Trial:
    """A decode row, a chunk behind a past, and a whole prompt, in a cache with NaN wherever no key is that they see."""

    def __init__(self, context: AttentionBackendContext, window: int | None) -> None:
        self._spec, self._device, self._window = context.spec, context.device, window
        self._dtype: torch.dtype = getattr(torch, self._spec.dtype)
        self._random = torch.Generator().manual_seed(0)
        size = self._spec.block_size
        self._lengths = [(1, max(2 * size + 1, _TRIAL_LENGTH)), (5, size + 6), (7, 7)]  # query rows, keys
        self.query = self._normal(sum(rows for rows, _ in self._lengths), self._spec.num_heads)
        self._keys = [self._normal(length, self._spec.num_kv_heads) for _, length in self._lengths]
        self._values = [self._normal(length, self._spec.num_kv_heads) for _, length in self._lengths]
        table, num_blocks = self._table()
        self.kv_cache = (self._paged(self._keys, table, num_blocks), self._paged(self._values, table, num_blocks))
        self.step = self._step(table)

    def expected(self, scale: float) -> torch.Tensor:
        """The result in float32, each sequence alone."""
        results, first = [], 0
        for (rows, length), key, value in zip(self._lengths, self._keys, self._values, strict=True):
            query = self.query[first : first + rows].float()
            results.append(self._attend(query, key.float(), value.float(), length, scale))
            first += rows
        return torch.cat(results)

    def _attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, length: int, scale: float
    ) -> torch.Tensor:
        group = query.shape[1] // key.shape[1]
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,lhd->hql", query, key) * scale
        positions = torch.arange(length - len(query), length, device=self._device)[:, None]
        keys = torch.arange(length, device=self._device)
        hidden = keys > positions
        if self._window is not None:
            hidden |= keys <= positions - self._window
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return torch.einsum("hql,lhd->qhd", weights, value)

    def _table(self) -> tuple[torch.Tensor, int]:
        """Blocks in an order of chance; entry 0 stands for what is not the sequence's."""
        counts = [-(-length // self._spec.block_size) for _, length in self._lengths]
        order = (torch.randperm(sum(counts), generator=self._random) + 1).tolist()
        table = torch.zeros(len(counts), max(counts) + 1, dtype=torch.int32)
        for row, count in enumerate(counts):
            first = self._first_seen(row) // self._spec.block_size
            table[row, first:count] = torch.tensor([order.pop() for _ in range(first, count)])
        return table, sum(counts) + 1

    def _first_seen(self, sequence: int) -> int:
        """The first position that any row of the sequence sees."""
        rows, length = self._lengths[sequence]
        return 0 if self._window is None else max(0, length - rows - self._window + 1)

    def _paged(self, sequences: Sequence[torch.Tensor], table: torch.Tensor, num_blocks: int) -> torch.Tensor:
        size = self._spec.block_size
        cache = torch.full(
            (num_blocks * size, *sequences[0].shape[1:]), torch.nan, dtype=self._dtype, device=self._device
        )
        for index, rows in enumerate(sequences):
            first = self._first_seen(index) // size * size
            positions = torch.arange(first, len(rows))
            slots = table[index, positions // size].long() * size + positions % size
            cache[slots.to(self._device)] = rows[first:]
        return cache.view(num_blocks, size, *cache.shape[1:])

    def _step(self, table: torch.Tensor) -> VarlenStep:
        rows = torch.tensor([0, *(rows for rows, _ in self._lengths)], device=self._device)
        lengths = torch.tensor([0, *(length for _, length in self._lengths)], device=self._device)
        return VarlenStep(
            query_starts=rows.cumsum(0).int(),
            key_starts=lengths.cumsum(0).int(),
            seq_lens=lengths[1:].int(),
            block_table=table.to(self._device),
            max_query_len=max(rows for rows, _ in self._lengths),
            max_seq_len=max(length for _, length in self._lengths),
        )

    def _normal(self, count: int, heads: int) -> torch.Tensor:
        made = torch.randn(count, heads, self._spec.head_dim, generator=self._random)
        return made.to(self._device, self._dtype)
