"""What of xformers 0.0.35 is called, as types.

Operators are called by their own `apply`, not through `memory_efficient_attention`: the public function refuses every
operator on a GPU where the package's C++ library does not load (built for another torch or CUDA), although none of
those used here is in that library. What it checks of the inputs, `XformersBackend.supports` has checked at launch.

Legend: N = sequences, T = query rows, L = K/V rows, H / HK = query / KV heads, G = H / HK, D = head size, P = pages.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, cast

from tokenyard.errors import PluginError

if TYPE_CHECKING:
    import torch


class Bias(Protocol):
    """A mask that an operator derives from lengths; what is in it is the operator's alone."""


class BlockDiagonalBias(Bias, Protocol):
    """Queries of sequence i see keys of sequence i; rows of all sequences lie one after the other."""

    def make_causal_from_bottomright(self) -> Bias: ...
    def make_local_attention_from_bottomright(self, window_size: int) -> Bias: ...


class GappyBias(Bias, Protocol):
    """Queries of sequence i see `kv_seqlen[i]` keys from `kv_seqstarts[i]` on."""

    def make_paged(
        self,
        block_tables: torch.Tensor,  # [N, P] int32
        page_size: int,
        notional_padding: int,  # keys that each sequence has room for
        paged_type: object,
    ) -> Bias: ...


class BlockDiagonalMask(Protocol):
    def from_seqlens(
        self, q_seqlen: Sequence[int], kv_seqlen: Sequence[int], *, device: torch.device
    ) -> BlockDiagonalBias: ...


class PagedPaddedKeysMask(Protocol):
    def from_seqlens(
        self,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int],
        block_tables: torch.Tensor,  # [N, P] int32
        page_size: int,
        *,
        device: torch.device,
    ) -> Bias: ...


class GappyKeysMask(Protocol):
    def from_seqlens(
        self,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],  # [N + 1], the last one is where the keys end
        kv_seqlen: Sequence[int],
        *,
        device: torch.device,
    ) -> GappyBias: ...


class Masks(Protocol):
    """The module `xformers.ops.fmha.attn_bias`."""

    @property
    def BlockDiagonalMask(self) -> BlockDiagonalMask: ...  # noqa: N802
    @property
    def BlockDiagonalGappyKeysMask(self) -> GappyKeysMask: ...  # noqa: N802
    @property
    def PagedBlockDiagonalPaddedKeysMask(self) -> PagedPaddedKeysMask: ...  # noqa: N802
    @property
    def PagedBlockDiagonalGappyKeysMask(self) -> object: ...  # noqa: N802


class MakeInputs(Protocol):
    """The class `xformers.ops.fmha.Inputs`."""

    def __call__(
        self,
        *,
        query: torch.Tensor,  # [1, T, HK, G, D]
        key: torch.Tensor,  # [1, L, HK, G, D], expanded from one head a group
        value: torch.Tensor,  # [1, L, HK, G, D]
        attn_bias: Bias,
        scale: float,
    ) -> object: ...


class Saved(Protocol):
    """What an operator keeps beside its output, if asked."""

    @property
    def lse(self) -> torch.Tensor: ...  # [1, HK, G, T] natural logarithms


class Operator(Protocol):
    """A class `FwOp`."""

    @property
    def NAME(self) -> str: ...  # noqa: N802
    def is_available(self) -> bool: ...

    def apply(self, inp: object, needs_gradient: bool) -> tuple[torch.Tensor, Saved | None]:
        """The output [1, T, HK, G, D], and with `needs_gradient` what a backward pass would need."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Operators:
    """The parts of the package that the backend uses."""

    masks: Masks
    inputs: MakeInputs
    paged: Operator  # K/V by block table, at most a few query rows a sequence
    prompt: Operator  # K/V rows one after the other, any number of query rows


def load_operators() -> Operators:
    """Raises PluginError where xformers cannot be imported, or torch has no flash attention for its operator."""
    try:
        with _without_warning():
            fmha = importlib.import_module("xformers.ops.fmha")
    except (ImportError, OSError, RuntimeError) as error:
        reason = " ".join(str(error).split())
        raise PluginError(f"attention 'xformers' cannot import its package: {reason}") from error
    prompt = cast("Operator", fmha.flash.FwOp)
    if not prompt.is_available():
        raise PluginError("attention 'xformers' attends prompts by flash attention, which this build of torch has not")
    return Operators(
        masks=cast("Masks", fmha.attn_bias),
        inputs=cast("MakeInputs", fmha.Inputs),
        paged=cast("Operator", fmha.triton_splitk.FwOp),
        prompt=prompt,
    )


@contextmanager
def _without_warning() -> Iterator[None]:
    """xformers warns that attention will not be available where its C++ library does not load; ours needs none."""
    theirs = logging.getLogger("xformers")
    level = theirs.level
    theirs.setLevel(logging.ERROR)
    try:
        yield
    finally:
        theirs.setLevel(level)
