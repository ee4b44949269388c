"""What a step's attention has to do, worked out once a step and window on the host, for all layers.

Nothing waits for the device: what is worked out here goes there through pinned memory.

Decoding sequences (one query row each) are padded with others of their length class to groups of one K/V length. The
class depends on the sequence alone, so its result does not depend on its batch mates. Every other sequence is attended
alone, its query rows cut into spans that read only the keys they can see.

Legend: B = sequences of a group, P = blocks a sequence, L = K/V rows a sequence, Q = query rows of a span.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenyard_backends.shared.block_tables import host_table
from tokenyard_backends.shared.uploads import to_device
from tokenyard_backends.shared.windows import window_start
from tokenyard_backends.torch_native.varlen import VarlenStep, varlen_step

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from tokenyard.interfaces import AttentionBatch

    Lengths = NDArray[np.int64]

_MAX_GROUP_TOKENS = 4096  # K/V rows gathered at a time: few enough to stay in a core's cache
_SPAN_ROWS = 512
_EXPLICIT_SPAN_ROWS = 128  # the explicit path keeps [heads, Q, L] scores in float32


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Sequences with one query row each and K/V of one padded length L."""

    rows: torch.Tensor | None  # [B] query rows; None = all rows of the step, in order
    blocks: torch.Tensor  # [B * P]
    num_sequences: int
    unwritten: torch.Tensor | None  # rows of the gathered [B * L] that hold garbage
    mask: torch.Tensor | None  # [B, 1, 1, L] added to scores


@dataclass(frozen=True, slots=True)
class QuerySpan:
    """Query rows of the step and the gathered K/V rows that they see."""

    rows: slice
    keys: slice
    mask: torch.Tensor | None  # [Q, L] added to scores; None = see `causal`
    causal: bool  # Q == L, lower triangle


@dataclass(frozen=True, slots=True)
class PromptWork:
    """One sequence with several query rows."""

    own_rows: slice | None  # all its K/V rows are this step's: no gather needed
    blocks: torch.Tensor | None  # [P]
    spans: tuple[QuerySpan, ...]


@dataclass(frozen=True, slots=True)
class StepWork:
    """A step, for the layers of one window."""

    groups: tuple[DecodeGroup, ...]
    prompts: tuple[PromptWork, ...]


class StepPlan:
    """One step's plan. `work` is computed when the first layer of a window asks, and kept for the others."""

    def __init__(self, batch: AttentionBatch, block_size: int, dtype: torch.dtype) -> None:
        self.slots = batch.slot_mapping
        self._batch = batch
        self._device = batch.block_table.device
        self._block_size = block_size
        self._dtype = dtype
        self._query_lens: Lengths = np.asarray(batch.query_lens, dtype=np.int64)
        self._context_lens: Lengths = np.asarray(batch.context_lens, dtype=np.int64)
        self._starts: Lengths = np.cumsum(self._query_lens) - self._query_lens
        self._work: dict[tuple[int | None, bool], StepWork] = {}
        self._varlen: VarlenStep | None = None

    @property
    def varlen(self) -> VarlenStep:
        """The step for torch's variable-length attention."""
        if self._varlen is None:
            self._varlen = varlen_step(self._batch, self._block_size)
        return self._varlen

    def work(self, window: int | None, *, explicit: bool) -> StepWork:
        """The work of layers with `window`; `explicit` ones compute scores themselves and need every mask."""
        key = (window, explicit)
        if key not in self._work:
            prompts = np.flatnonzero(self._query_lens > 1)
            self._work[key] = StepWork(
                groups=tuple(self._decode_groups(window)),
                prompts=tuple(self._prompt(int(index), window, explicit) for index in prompts),
            )
        return self._work[key]

    def _decode_groups(self, window: int | None) -> list[DecodeGroup]:
        sequences = np.flatnonzero(self._query_lens == 1)
        lengths = self._context_lens[sequences]
        first_blocks = window_start(lengths - 1, window) // self._block_size
        classes = _length_class(-(-lengths // self._block_size) - first_blocks)
        groups = []
        for num_blocks in np.unique(classes):
            members = np.flatnonzero(classes == num_blocks)
            step = max(1, _MAX_GROUP_TOKENS // (int(num_blocks) * self._block_size))
            for start in range(0, len(members), step):
                chosen = members[start : start + step]
                group = self._decode_group(sequences[chosen], first_blocks[chosen], int(num_blocks), window)
                groups.append(group)
        return groups

    def _decode_group(
        self, sequences: Lengths, first_blocks: Lengths, num_blocks: int, window: int | None
    ) -> DecodeGroup:
        lengths = self._context_lens[sequences][:, None]
        block_index = first_blocks[:, None] + np.arange(num_blocks)  # [B, P]
        block_index = np.minimum(block_index, (lengths - 1) // self._block_size)  # never past the table's own blocks
        positions = first_blocks[:, None] * self._block_size + np.arange(num_blocks * self._block_size)  # [B, L]
        written = positions < lengths
        seen = written & (positions >= window_start(lengths - 1, window))
        whole_step = len(sequences) == len(self._query_lens)
        return DecodeGroup(
            rows=None if whole_step else self._to_device(self._starts[sequences]),
            blocks=self._blocks(sequences[:, None], block_index).flatten(),
            num_sequences=len(sequences),
            unwritten=None if written.all() else self._to_device(np.flatnonzero(~written)),
            mask=None if seen.all() else self._mask(~seen)[:, None, None],
        )

    def _prompt(self, index: int, window: int | None, explicit: bool) -> PromptWork:
        start, num_rows = int(self._starts[index]), int(self._query_lens[index])
        length = int(self._context_lens[index])
        past = length - num_rows
        first_block = int(window_start(np.asarray(past), window)) // self._block_size if past else 0
        origin = first_block * self._block_size
        num_blocks = -(-length // self._block_size)
        spans: tuple[QuerySpan, ...]
        if not past and window is None and not explicit:
            spans = (QuerySpan(slice(start, start + num_rows), slice(0, length), None, causal=True),)
        else:
            bounds = _span_bounds(past, length, _EXPLICIT_SPAN_ROWS if explicit else _SPAN_ROWS)
            spans = tuple(self._span(start + low - past, low, high, origin, window) for low, high in bounds)
        block_index = np.arange(first_block, num_blocks)
        return PromptWork(
            own_rows=None if past else slice(start, start + num_rows),
            blocks=self._blocks(np.asarray(index), block_index) if past else None,
            spans=spans,
        )

    def _span(self, first_row: int, low: int, high: int, origin: int, window: int | None) -> QuerySpan:
        """The query positions low:high of a sequence, in the step's rows from `first_row` on."""
        first = int(window_start(np.asarray(low), window))
        queries = torch.arange(low, high, device=self._device)[:, None]
        keys = torch.arange(first, high, device=self._device)
        hidden = keys > queries
        if window is not None:
            hidden |= keys <= queries - window
        rows = slice(first_row, first_row + high - low)
        return QuerySpan(rows, slice(first - origin, high - origin), self._added(hidden), causal=False)

    def _blocks(self, sequences: Lengths, block_index: Lengths) -> torch.Tensor:
        """Block ids of the table at (sequence, index), on the device."""
        return self._to_device(host_table(self._batch)[sequences, block_index].astype(np.int64))

    def _mask(self, hidden: NDArray[np.bool_]) -> torch.Tensor:
        return self._added(self._to_device(hidden))

    def _added(self, hidden: torch.Tensor) -> torch.Tensor:
        """What is added to scores."""
        mask = torch.zeros(hidden.shape, dtype=self._dtype, device=self._device)
        return mask.masked_fill_(hidden, -torch.inf)

    def _to_device(self, values: NDArray[np.generic]) -> torch.Tensor:
        return to_device(values, self._device)


def _length_class(num_blocks: Lengths) -> Lengths:
    """Round up: exact up to 16 blocks, then eight classes an octave, so at most an eighth more."""
    granule = 2 ** np.maximum(np.ceil(np.log2(num_blocks)).astype(np.int64) - 4, 0)
    classes: Lengths = -(-num_blocks // granule) * granule
    return classes


def _span_bounds(low: int, high: int, size: int) -> list[tuple[int, int]]:
    return [(start, min(start + size, high)) for start in range(low, high, size)]
