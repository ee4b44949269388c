"""The real package as far as it goes without a GPU; skipped where it is not installed."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import fake_flashinfer as fake
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenyard_backends.flashinfer.metadata import HostBatch, pages_of, to_tensors

RECORD = json.loads(fake.RECORD.read_text())
FIRST, LAST = fake.VERSIONS[0], fake.VERSIONS[-1]
is_installed = importlib.util.find_spec("flashinfer") is not None
needs_package = pytest.mark.skipif(not is_installed, reason="flashinfer-python is not installed")

CALLED = {
    "BatchDecodeWithPagedKVCacheWrapper.__init__",
    "BatchDecodeWithPagedKVCacheWrapper.plan",
    "BatchDecodeWithPagedKVCacheWrapper._plan_impl",
    "BatchDecodeWithPagedKVCacheWrapper.run",
    "BatchDecodeWithPagedKVCacheWrapper.reset_workspace_buffer",
    "BatchPrefillWithPagedKVCacheWrapper.__init__",
    "BatchPrefillWithPagedKVCacheWrapper.plan",
    "BatchPrefillWithPagedKVCacheWrapper.run",
    "merge_state_in_place",
    "get_seq_lens",
}


@pytest.mark.parametrize("version", fake.VERSIONS)
def test_the_record_of_every_release_has_what_is_called(version: str) -> None:
    assert set(RECORD[version]) >= CALLED


def test_the_record_spans_the_releases_that_are_taken() -> None:
    assert (FIRST, LAST) == ("0.7.0.post1", "0.7.4")


@needs_package
@pytest.mark.parametrize("name", sorted(CALLED))
def test_the_recorded_signature_is_the_real_one(name: str) -> None:
    flashinfer: Any = importlib.import_module("flashinfer")

    real = flashinfer
    for part in name.split("."):
        real = getattr(real, part)
    found = inspect.signature(real).parameters.values()
    recorded = fake.recorded_signature(metadata.version("flashinfer-python"), name).parameters.values()
    assert [(one.name, one.kind) for one in found] == [(one.name, one.kind) for one in recorded]
    has_default = [one.default is not inspect.Parameter.empty for one in found]
    assert has_default == [one.default is not inspect.Parameter.empty for one in recorded]


@needs_package
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 20), st.integers(0, 90)).map(lambda pair: (pair[0], sum(pair))),
        min_size=1,
        max_size=8,
    ),
    block_size=st.sampled_from([1, 16, 32]),
)
@settings(max_examples=50, deadline=None)
def test_the_package_reads_the_lengths_that_we_meant_out_of_our_pages(
    lengths: list[tuple[int, int]], block_size: int
) -> None:
    flashinfer: Any = importlib.import_module("flashinfer")

    table = np.arange(len(lengths) * 120, dtype=np.int32).reshape(len(lengths), 120)
    queries, contexts = np.array(lengths, dtype=np.int32).T
    batch = HostBatch(query_lens=queries, context_lens=contexts, block_table=table)
    pages = to_tensors(pages_of(batch, block_size), torch.device("cpu"))
    found = flashinfer.get_seq_lens(pages.page_start, pages.last_page_len, block_size)
    assert found.tolist() == contexts.tolist()


_SPECS = """
import torch
from flashinfer.jit.attention.modules import gen_batch_decode_module, gen_batch_prefill_module
from flashinfer.jit.cascade import gen_cascade_module
types = (torch.bfloat16,) * 3 + (torch.int32,)
specs = [gen_cascade_module()]
for head_dim in (64, 128, 256):
    for window, soft_cap in ((False, False), (True, True)):
        shape = (*types, head_dim, head_dim, 0, window, soft_cap)
        specs += [gen_batch_decode_module(*shape)]
        specs += [gen_batch_prefill_module(backend, *shape, False) for backend in ("fa2", "fa3")]
assert all(source.exists() for spec in specs for source in spec.sources)
print(len({spec.name for spec in specs}))
"""


@needs_package
def test_every_kernel_that_we_use_has_sources_to_build_it_from(tmp_path: Path) -> None:
    environment = os.environ | {"FLASHINFER_CUDA_ARCH_LIST": "9.0a", "FLASHINFER_WORKSPACE_BASE": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", _SPECS], env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == "19"


@needs_package
@pytest.mark.parametrize("file", ["batch_decode.cu", "batch_prefill.cu", "batch_prefill_sm90.cu"])
def test_the_kernels_that_we_use_still_leave_sinks_unread(file: str) -> None:
    """If this fails, `run(sinks=...)` may have become the better way."""
    flashinfer: Any = importlib.import_module("flashinfer")

    source = Path(flashinfer.__file__).parent / "data" / "csrc" / file
    assert "sink" not in source.read_text()
