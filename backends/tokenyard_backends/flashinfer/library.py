"""What of the package `flashinfer` is called, as types; signatures are alike in 0.7.0 to 0.7.4.

Legend: N = sequences, T = query rows, P = pages of all sequences, H / HK = query / KV heads, D = head size.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Protocol, cast

from tokenyard.errors import PluginError

if TYPE_CHECKING:
    import torch


class DecodeWrapper(Protocol):
    """BatchDecodeWithPagedKVCacheWrapper: one query row a sequence."""

    def plan(
        self,
        indptr: torch.Tensor,  # [N + 1] int32, host
        indices: torch.Tensor,  # [P] int32
        last_page_len: torch.Tensor,  # [N] int32, host
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        *,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        o_data_type: torch.dtype,
        sm_scale: float,
    ) -> None: ...

    def run(
        self,
        q: torch.Tensor,  # [N, H, D]
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],  # [pages, page size, HK, D] each
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None,  # [N, H] float32, log2
        return_lse: bool,
    ) -> object: ...

    def reset_workspace_buffer(
        self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor
    ) -> None: ...


class PrefillWrapper(Protocol):
    """BatchPrefillWithPagedKVCacheWrapper: any number of query rows a sequence."""

    def plan(
        self,
        qo_indptr: torch.Tensor,  # [N + 1] int32, host
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        *,
        causal: bool,
        window_left: int,
        logits_soft_cap: float | None,
        q_data_type: torch.dtype,
        kv_data_type: torch.dtype,
        o_data_type: torch.dtype,
        sm_scale: float,
    ) -> None: ...

    def run(
        self,
        q: torch.Tensor,  # [T, H, D]
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor,
        lse: torch.Tensor | None,  # [T, H] float32, log2
        return_lse: bool,
    ) -> object: ...


class Library(Protocol):
    """The module itself."""

    __version__: str

    def BatchDecodeWithPagedKVCacheWrapper(  # noqa: N802
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        *,
        use_cuda_graph: bool = False,
        use_tensor_cores: bool,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str,
    ) -> DecodeWrapper: ...

    def BatchPrefillWithPagedKVCacheWrapper(  # noqa: N802
        self, float_workspace_buffer: torch.Tensor, kv_layout: str, *, backend: str
    ) -> PrefillWrapper: ...

    def merge_state_in_place(
        self, v: torch.Tensor, s: torch.Tensor, v_other: torch.Tensor, s_other: torch.Tensor
    ) -> None:
        """[T, H, D] and [T, H] float32 (log2) of two parts of the K/V; the result replaces the first."""


def load_library() -> Library:
    """Import `flashinfer`; PluginError when that fails although the package is installed."""
    try:
        return cast(Library, importlib.import_module("flashinfer"))
    except Exception as error:  # whatever its dependencies raise
        raise PluginError(
            f"attention 'flashinfer': the package cannot be imported ({type(error).__name__}: {error}); "
            "`python -c 'import flashinfer'` shows where"
        ) from error
