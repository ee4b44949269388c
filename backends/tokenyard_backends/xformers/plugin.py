"""The built-in attention backend `xformers`: its paged split-K operator for decoding, flash attention for prompts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tokenyard import AttentionBackendDescriptor, hookimpl

from tokenyard_backends.shared.requirements import dotted, gpu_reasons, release

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenyard.config import NoOptions
    from tokenyard.interfaces import AttentionBackend, AttentionBackendContext, AttentionSpec
    from tokenyard.platform import Platform

_VERSION = "0.0.35"
_MIN_CAPABILITY = (8, 0)
# The operator's kernels compile for sm_80 and sm_90 with 3.6.0, 3.7.0, 3.7.1 and 3.8.0; 3.9 has no block pointers.
_FIRST_TRITON = (3, 6)
_LAST_TRITON = (3, 8)


def _requires(platform: Platform) -> Sequence[str]:
    return [*_package_reasons(platform), *_triton_reasons(platform), *gpu_reasons(platform, _MIN_CAPABILITY)]


def _package_reasons(platform: Platform) -> Iterator[str]:
    version = platform.package_version("xformers")
    if version is None:
        yield f"xformers is not installed; `pip install 'tokenyard[xformers]'` brings it ({_VERSION})"
    elif version.partition("+")[0] != _VERSION:
        yield (
            f"xformers {version} is installed, and {_VERSION} is what it is written for: the last release with paged "
            "attention of its own"
        )


def _triton_reasons(platform: Platform) -> Iterator[str]:
    version = platform.package_version("triton")  # None also where another distribution has the package
    if not platform.has_package("triton"):
        yield "triton is not installed; torch's builds for CUDA bring it"
    elif version is not None and not _FIRST_TRITON <= release(version)[:2] <= _LAST_TRITON:
        yield (
            f"triton {version} is installed, and xformers' paged kernel compiles with {dotted(_FIRST_TRITON)} to "
            f"{dotted(_LAST_TRITON)} only: it needs block pointers"
        )


def _supports(spec: AttentionSpec) -> Sequence[str]:
    from tokenyard_backends.xformers.backend import XformersBackend  # imports torch

    return XformersBackend.supports(spec)


def _build(options: NoOptions, context: AttentionBackendContext) -> AttentionBackend:
    from triton.runtime import driver

    from tokenyard_backends.xformers.backend import XformersBackend  # imports torch
    from tokenyard_backends.xformers.operators import load_operators  # imports torch, then xformers

    driver.active.get_current_target()  # compiled here by a C compiler, if at all: not in the first step
    return XformersBackend(context, load_operators())


@hookimpl
def tokenyard_attention_backends() -> Iterator[AttentionBackendDescriptor[NoOptions]]:
    yield AttentionBackendDescriptor(
        name="xformers",
        api_version=(1, 7),
        summary=f"xformers {_VERSION} on NVIDIA GPUs, legacy: decodes over pages, gathers prompts; an extra",
        factory=_build,
        supports=_supports,
        requires=_requires,
        auto_rank=40,
        tested_on=frozenset(),
    )
