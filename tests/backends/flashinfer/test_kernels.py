"""What only a GPU needs: the order of plans and copies, and which kernels a GPU gets."""

from __future__ import annotations

import importlib
from dataclasses import replace
from typing import Any

import fake_flashinfer as fake
import numpy as np
import pytest
import torch
from tokenyard.errors import ConfigError
from tokenyard_backends.flashinfer.backend import _prefill_backend
from tokenyard_backends.flashinfer.kernels import DecodeKernel, Kernel, KernelSettings, LayerKind, PrefillKernel
from tokenyard_backends.flashinfer.metadata import Pages, to_tensors
from tokenyard_backends.flashinfer.plugin import FlashInferOptions

KIND = LayerKind(group=0, window=None, soft_cap=None, scale=0.1)
PAGES = to_tensors(
    Pages(
        query_start=np.array([0, 1], dtype=np.int32),
        page_start=np.array([0, 1], dtype=np.int32),
        page_ids=np.array([3], dtype=np.int32),
        last_page_len=np.array([5], dtype=np.int32),
    ),
    torch.device("cpu"),
)


@pytest.fixture
def settings(calls: fake.Calls) -> KernelSettings:
    return KernelSettings(
        library=importlib.import_module("flashinfer"),
        device=torch.device("cpu"),
        workspace=torch.zeros(1 << 20, dtype=torch.uint8),
        num_heads=4,
        num_kv_heads=2,
        head_dim=64,
        block_size=16,
        dtype=torch.bfloat16,
        prefill_backend="fa2",
        decode_tensor_cores=False,
    )


@pytest.mark.parametrize("kernel_type", [DecodeKernel, PrefillKernel])
def test_a_gpu_plan_waits_until_the_one_before_it_has_left_the_pinned_buffer(
    settings: KernelSettings, calls: fake.Calls, monkeypatch: pytest.MonkeyPatch, kernel_type: type[Kernel]
) -> None:
    happened: list[str] = []

    class Event:
        def synchronize(self) -> None:
            happened.append("wait")

        def record(self) -> None:
            happened.append("mark")

    monkeypatch.setattr(torch.cuda, "Event", Event)
    bind = calls.bind

    def noted(name: str, *args: object, **kwargs: object) -> dict[str, Any]:
        happened.extend(["plan"] if name.endswith(".plan") else [])
        return bind(name, *args, **kwargs)

    monkeypatch.setattr(calls, "bind", noted)
    kernel = kernel_type(replace(settings, device=torch.device("cuda")))
    for _ in range(2):
        kernel.plan(PAGES, KIND)
    assert happened == ["wait", "plan", "mark"] * 2


def test_a_plan_that_fails_leaves_no_owner(settings: KernelSettings, calls: fake.Calls) -> None:
    kernel = PrefillKernel(settings)
    kernel.plan(PAGES, KIND)
    kernel.owner = "a step"
    calls.plan_error = RuntimeError("CUDA error: out of luck")
    with pytest.raises(RuntimeError, match="out of luck"):
        kernel.plan(PAGES, KIND)
    assert kernel.owner is None


@pytest.mark.parametrize(
    ("capability", "option", "taken"),
    [
        ((8, 0), "auto", "fa2"),
        ((9, 0), "auto", "auto"),
        ((10, 0), "auto", "fa2"),
        ((9, 0), "fa2", "fa2"),
        ((9, 0), "fa3", "fa3"),
    ],
)
def test_flashinfer_chooses_between_its_kernels_on_hopper_only(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], option: Any, taken: str
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    assert _prefill_backend(FlashInferOptions(prefill_kernel=option), torch.device("cuda")) == taken


def test_fa3_is_refused_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    with pytest.raises(ConfigError, match="fa3 needs a Hopper GPU"):
        _prefill_backend(FlashInferOptions(prefill_kernel="fa3"), torch.device("cuda"))
