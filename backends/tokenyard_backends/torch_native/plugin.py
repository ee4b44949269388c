"""The built-in attention backend `torch_native`: paged attention from torch's own operators, on any device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard import AttentionBackendDescriptor, hookimpl

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenyard.config import NoOptions
    from tokenyard.interfaces import AttentionBackend, AttentionBackendContext, AttentionSpec


def _supports(spec: AttentionSpec) -> Sequence[str]:
    from tokenyard_backends.torch_native.backend import TorchNativeBackend  # imports torch

    return TorchNativeBackend.supports(spec)


def _build(options: NoOptions, context: AttentionBackendContext) -> AttentionBackend:
    from tokenyard_backends.torch_native.backend import TorchNativeBackend  # imports torch

    return TorchNativeBackend(context)


@hookimpl
def tokenyard_attention_backends() -> Iterator[AttentionBackendDescriptor[NoOptions]]:
    yield AttentionBackendDescriptor(
        name="torch_native",
        api_version=(1, 7),
        summary="paged attention from torch's own operators: any device, nothing to compile",
        factory=_build,
        supports=_supports,
        auto_rank=100,
        tested_on=frozenset({"cpu"}),
    )
