"""Kernels in Triton's interpreter; see the folder above."""

from __future__ import annotations

import pytest
from tokenyard_backends.triton.limits import is_interpreted

if is_interpreted():
    import triton_bf16

    triton_bf16.install()

collect_ignore_glob = [] if is_interpreted() else ["test_*.py"]


@pytest.fixture(autouse=True, scope="session")
def _interpreted() -> None:
    """Whatever the reason may be, a compiled kernel is not what is tested here."""
    from tokenyard_backends.triton import kernels
    from triton.runtime.jit import JITFunction

    assert not isinstance(kernels.decode_kernel, JITFunction)
