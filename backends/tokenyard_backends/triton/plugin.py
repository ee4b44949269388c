"""The built-in attention backend `triton`: kernels of our own, compiled for the GPU at their first use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard import AttentionBackendDescriptor, hookimpl

from tokenyard_backends.shared.requirements import dotted, gpu_reasons, release
from tokenyard_backends.triton.limits import is_interpreted

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenyard.interfaces import AttentionBackend, AttentionBackendContext, AttentionSpec
    from tokenyard.platform import Platform

_MIN_VERSION = (3, 6)
_MIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TritonOptions:
    """Options of the backend."""

    # K/V tokens of a decoding sequence that are read by one program at least; a longer context is split among several,
    # at most 32. Fewer tokens keep a large GPU busy with few sequences, at the price of merging more parts.
    split_tokens: int = 256


def _requires(platform: Platform) -> Iterator[str]:
    wanted = dotted(_MIN_VERSION)
    version = platform.package_version("triton")  # None also where another distribution has the package
    if not platform.has_package("triton"):
        yield f"triton is not installed; `pip install 'tokenyard[triton]'` brings it ({wanted} or later)"
    elif version is not None and release(version) < _MIN_VERSION:
        yield f"triton {version} is installed, and it needs {wanted} or later"
    if is_interpreted():
        return
    yield from gpu_reasons(platform, _MIN_CAPABILITY)
    if platform.compute_capability is None:
        yield "TRITON_INTERPRET=1 would run it on the CPU, for tests, about a thousand times slower"


def _supports(spec: AttentionSpec) -> Sequence[str]:
    from tokenyard_backends.triton.limits import refusals

    return refusals(spec)


def _build(options: TritonOptions, context: AttentionBackendContext) -> AttentionBackend:
    from triton.runtime import driver

    from tokenyard_backends.triton.backend import TritonBackend  # imports torch and Triton

    if not is_interpreted():
        driver.active.get_current_target()  # compiled here by a C compiler, if at all: not in the first step
    return TritonBackend(options, context)


@hookimpl
def tokenyard_attention_backends() -> Iterator[AttentionBackendDescriptor[TritonOptions]]:
    yield AttentionBackendDescriptor(
        name="triton",
        api_version=(1, 7),
        summary="Triton kernels of our own on NVIDIA GPUs, no CUDA toolkit needed; triton is an extra",
        options_type=TritonOptions,
        factory=_build,
        supports=_supports,
        requires=lambda platform: list(_requires(platform)),
        auto_rank=None if is_interpreted() else 30,  # nobody wants the interpreter without having asked for it
        tested_on=frozenset(),
    )
