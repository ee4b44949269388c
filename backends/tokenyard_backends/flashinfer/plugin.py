"""The built-in attention backend `flashinfer`: FlashInfer's paged kernels, planned once a step, on NVIDIA GPUs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from tokenyard import AttentionBackendDescriptor, hookimpl

from tokenyard_backends.shared.requirements import dotted, gpu_reasons, release

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenyard.interfaces import AttentionBackend, AttentionBackendContext, AttentionSpec
    from tokenyard.platform import Platform

_DISTRIBUTION = "flashinfer-python"
_FIRST, _LAST = (0, 7, 0), (0, 7, 4)  # releases whose signatures and sources were checked, both included
_MIN_CAPABILITY = (8, 0)
_DEFAULT_CUDA = Path("/usr/local/cuda")  # where FlashInfer looks without nvcc and CUDA_HOME


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashInferOptions:
    """Options under `attention`; FlashInfer's own name of a thing is in parentheses."""

    workspace_mib: int = 128  # on the GPU, for partial results of split K/V (float_workspace_buffer)
    prefill_kernel: Literal["auto", "fa2", "fa3"] = "auto"  # auto = FlashInfer's choice on Hopper, fa2 elsewhere
    decode_tensor_cores: bool | None = None  # None = from 4 query heads a KV head on (use_tensor_cores)
    cascade: bool = False  # read a prefix that all sequences of a step share once; without CUDA graphs
    cascade_min_blocks: int = 16  # shared blocks from which on `cascade` does so


def _requires(platform: Platform) -> Sequence[str]:
    return [*_package_reasons(platform), *gpu_reasons(platform, _MIN_CAPABILITY), *_compiler_reasons(platform)]


def _package_reasons(platform: Platform) -> Iterator[str]:
    version = platform.package_version(_DISTRIBUTION)
    span = f"{dotted(_FIRST)} to {dotted(_LAST)}"
    if version is None:
        yield f"{_DISTRIBUTION} is not installed; `pip install 'tokenyard[flashinfer]'` brings it ({span})"
    elif not _FIRST <= release(version) <= _LAST:
        yield f"{_DISTRIBUTION} {version} is installed, and {span} are what it is written for"


def _compiler_reasons(platform: Platform) -> Iterator[str]:
    """FlashInfer compiles each kernel at its first use, unless a package brings them compiled."""
    if platform.has_package("flashinfer_jit_cache") or platform.has_program("nvcc"):
        return
    named = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    if named is None and not _DEFAULT_CUDA.exists():
        yield (
            "its kernels are compiled at first use, and neither nvcc nor CUDA_HOME nor the package "
            "flashinfer-jit-cache is there"
        )


def _supports(spec: AttentionSpec) -> Sequence[str]:
    from tokenyard_backends.flashinfer.backend import FlashInferBackend  # imports torch

    return FlashInferBackend.supports(spec)


def _build(options: FlashInferOptions, context: AttentionBackendContext) -> AttentionBackend:
    from tokenyard_backends.flashinfer.backend import make_backend  # imports torch, then FlashInfer

    return make_backend(options, context)


@hookimpl
def tokenyard_attention_backends() -> Iterator[AttentionBackendDescriptor[FlashInferOptions]]:
    yield AttentionBackendDescriptor(
        name="flashinfer",
        api_version=(1, 7),
        summary="FlashInfer's paged kernels on NVIDIA GPUs, planned once a step; its package is an extra",
        options_type=FlashInferOptions,
        factory=_build,
        supports=_supports,
        requires=_requires,
        auto_rank=20,
        tested_on=frozenset(),
    )
