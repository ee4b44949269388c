"""What the kernels can serve; known without Triton."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from tokenyard_backends.shared.refusals import common_refusals, nvidia_refusals

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tokenyard.interfaces import AttentionSpec

DTYPES = ("float32", "bfloat16", "float16")
MAX_HEAD_DIM = 256
_TRUE = frozenset({"1", "true", "yes", "y", "on"})  # as Triton reads its variables


def is_interpreted() -> bool:
    """Whether Triton runs its kernels in its interpreter in this process."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in _TRUE


def refusals(spec: AttentionSpec) -> list[str]:
    """One reason for each thing that speaks against `spec`; empty = it is served."""
    return [*_device_refusals(spec), *common_refusals(spec, DTYPES), *_head_dim_refusals(spec)]


def _device_refusals(spec: AttentionSpec) -> Iterator[str]:
    if spec.device_type != "cpu":
        yield from nvidia_refusals(spec)
    elif not is_interpreted():
        yield "device type cpu is not cuda; tensors on a CPU need TRITON_INTERPRET=1 in the environment"


def _head_dim_refusals(spec: AttentionSpec) -> Iterator[str]:
    for whose, size in (("keys", spec.head_dim), ("values", spec.v_head_dim)):
        if not 1 <= size <= MAX_HEAD_DIM:
            yield f"the {whose}' head size {size} is not in 1 to {MAX_HEAD_DIM}"
