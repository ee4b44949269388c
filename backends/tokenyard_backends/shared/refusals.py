"""What several backends cannot serve, in one wording: one reason for each thing that speaks against a spec."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator

    from tokenyard.interfaces import AttentionSpec


def nvidia_refusals(spec: AttentionSpec) -> Iterator[str]:
    """Of a backend that runs on NVIDIA GPUs alone."""
    import torch  # not for plugins that are only listed

    if spec.device_type != "cuda":
        yield f"device type {spec.device_type} is not cuda"
    if torch.version.hip is not None:
        yield "it needs an NVIDIA GPU, and this torch is built for AMD's"


def common_refusals(spec: AttentionSpec, dtypes: Collection[str]) -> Iterator[str]:
    """Of a backend for causal attention in `dtypes`, which are the cache's too."""
    if spec.dtype not in dtypes:
        yield f"dtype {spec.dtype} is not one of: {', '.join(dtypes)}"
    if spec.kv_cache_dtype not in ("auto", spec.dtype):
        yield f"a K/V cache of dtype {spec.kv_cache_dtype} is not available; use auto"
    if not spec.causal:
        yield "attention that is not causal is not available"
    if spec.num_kv_heads < 1 or spec.num_heads < 1 or spec.num_heads % spec.num_kv_heads:
        yield f"{spec.num_heads} heads are not a multiple of {spec.num_kv_heads} KV heads"
    if spec.block_size < 1:
        yield f"block size {spec.block_size} is below 1"


def head_dim_refusals(spec: AttentionSpec, head_dims: Collection[int]) -> Iterator[str]:
    """Of a backend whose kernels are made for `head_dims`, the same for keys and values."""
    if spec.head_dim not in head_dims:
        yield f"head size {spec.head_dim} is not one of: {', '.join(map(str, head_dims))}"
    if spec.v_head_dim != spec.head_dim:
        yield f"the values' head size {spec.v_head_dim} differs from the keys' {spec.head_dim}"
