"""The plugin: who it refuses and why, before anything heavy is imported."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
from tokenyard.interfaces import AttentionSpec
from tokenyard.platform import Platform
from tokenyard_backends.triton import plugin
from tokenyard_backends.triton.limits import is_interpreted
from triton import knobs

SPEC = AttentionSpec(
    device_type="cuda", dtype="bfloat16", num_heads=8, num_kv_heads=2, head_dim=128, v_head_dim=128, block_size=16
)


class Machine(Platform):
    """A machine that may have Triton and a GPU."""

    device_type = "cuda"  # type: ignore[assignment]

    def __init__(self, version: str | None = "3.9.0", capability: tuple[int, int] | None = (9, 0)) -> None:
        self.version = version
        self.compute_capability = capability  # type: ignore[misc]

    def has_package(self, import_name: str) -> bool:
        return self.version is not None

    def package_version(self, distribution: str) -> str | None:
        return None if self.version == "elsewhere" else self.version


def descriptor() -> object:
    (found,) = plugin.tokenyard_attention_backends()
    return found


@pytest.mark.parametrize("version", ["3.6.0", "3.9.0", "3.10.1+git12", "4.0", "elsewhere"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (12, 0)])
def test_it_runs_where_triton_and_a_gpu_are(version: str, capability: tuple[int, int]) -> None:
    assert descriptor().requires(Machine(version, capability)) == []


@pytest.mark.parametrize(
    ("machine", "says"),
    [
        (Machine(version=None), "triton is not installed; `pip install 'tokenyard[triton]'` brings it (3.6 or later)"),
        (Machine("3.5.1"), "triton 3.5.1 is installed, and it needs 3.6 or later"),
        (Machine("nightly"), "triton nightly is installed, and it needs 3.6 or later"),
        (Machine(capability=(7, 5)), "compute capability 8.0 or later, and this one has 7.5"),
        (Machine(capability=None), "it needs an NVIDIA GPU, and torch sees none"),
    ],
)
def test_what_is_missing_is_told(machine: Machine, says: str) -> None:
    assert says in descriptor().requires(machine)[0]


def test_everything_that_is_missing_is_told_at_once() -> None:
    reasons = descriptor().requires(Machine(version=None, capability=None))
    assert [reason.split()[0] for reason in reasons] == ["triton", "it", "TRITON_INTERPRET=1"]


@pytest.mark.parametrize("value", ["", "0", "1", "true", "TRUE", "yes", "on", "y", "2", "no"])
def test_the_interpreter_is_seen_as_triton_sees_it(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert is_interpreted() == knobs.runtime.interpret


def test_the_interpreter_needs_no_gpu_and_is_never_taken_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    assert descriptor().auto_rank == 30
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert descriptor().requires(Machine(capability=None)) == []
    assert descriptor().auto_rank is None
    assert descriptor().supports(replace(SPEC, device_type="cpu")) == []


def test_what_it_cannot_serve_is_refused_with_one_reason_each() -> None:
    assert descriptor().supports(SPEC) == []
    bad = AttentionSpec(
        device_type="mps",
        dtype="float64",
        num_heads=7,
        num_kv_heads=2,
        head_dim=576,
        v_head_dim=0,
        block_size=0,
        causal=False,
        kv_cache_dtype="fp8_e4m3",
    )
    reasons = descriptor().supports(bad)
    words = (
        "mps",
        "float64",
        "fp8_e4m3",
        "causal",
        "7 heads",
        "keys' head size 576",
        "values' head size 0",
        "block size",
    )
    for word in words:
        assert sum(word in reason for reason in reasons) == 1, word
    assert len(reasons) == len(words)


def test_a_cpu_is_refused_with_the_way_out() -> None:
    (reason,) = descriptor().supports(replace(SPEC, device_type="cpu"))
    assert "TRITON_INTERPRET=1" in reason


def test_nothing_is_divided_by_no_heads() -> None:
    assert descriptor().supports(replace(SPEC, num_kv_heads=0)) == ["8 heads are not a multiple of 0 KV heads"]


def test_amds_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.hip", "6.4")
    (reason,) = descriptor().supports(SPEC)
    assert "AMD" in reason


def test_importing_the_plugin_imports_neither_torch_nor_triton() -> None:
    code = (
        "import sys; from tokenyard_backends.triton import plugin; list(plugin.tokenyard_attention_backends()); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'triton', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
