"""What every attention backend owes, from these kernels in the interpreter."""

from __future__ import annotations

import pytest
from tokenyard.testing import AttentionBackendContract


class TestTriton(AttentionBackendContract):
    """Short steps and splits: a program takes a millisecond or two for each tile that it reads."""

    overrides = ("attention=triton", "attention.split_tokens=32")
    same_bits = True
    max_examples = 2
    longest_query = 16
    longest_context = 60


@pytest.mark.slow
class TestTritonAtLength(AttentionBackendContract):
    """Its own splits and longer steps, many more of them."""

    overrides = ("attention=triton",)
    same_bits = True
    max_examples = 6
    longest_query = 100
    longest_context = 600
