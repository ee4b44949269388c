"""The contract of attention backends, through the stand-in for the package: its tensors are on the CPU."""

from __future__ import annotations

import sys

import fake_flashinfer as fake
import pytest
from tokenyard.testing import AttentionBackendContract


class TestFlashInfer(AttentionBackendContract):
    overrides = ["attention=flashinfer", "attention.workspace_mib=1"]  # noqa: RUF012
    device_type = "cuda"
    dtypes = ("bfloat16", "float16")
    head_dims = (64, 128, 256)
    v_head_dims = ()
    group_sizes = (1, 3, 4, 8, 5)
    max_examples = 20

    @pytest.fixture(autouse=True)
    def _stand_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        module, _ = fake.fake_flashinfer(fake.VERSIONS[-1])
        monkeypatch.setitem(sys.modules, "flashinfer", module)
