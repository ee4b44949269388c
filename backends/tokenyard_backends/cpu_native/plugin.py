"""The built-in attention backend `cpu_native`: C++ kernels that the user's compiler builds at first use."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard import AttentionBackendDescriptor, hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenyard.config import NoOptions
    from tokenyard.interfaces import AttentionBackend, AttentionBackendContext, AttentionSpec


def _supports(spec: AttentionSpec) -> Sequence[str]:
    from tokenyard_backends.cpu_native.backend import CpuNativeBackend  # imports torch

    return CpuNativeBackend.supports(spec)


def _build(options: NoOptions, context: AttentionBackendContext) -> AttentionBackend:
    from tokenyard_backends.cpu_native.backend import make_backend  # imports torch

    return make_backend(context)


@hookimpl
def tokenyard_attention_backends() -> Iterator[AttentionBackendDescriptor[NoOptions]]:
    yield AttentionBackendDescriptor(
        name="cpu_native",
        api_version=(1, 7),
        summary="paged attention on a CPU in C++, compiled at first use; without a compiler, torch_native",
        factory=_build,
        supports=_supports,
        auto_rank=10,
        tested_on=frozenset({"cpu"}),
    )
