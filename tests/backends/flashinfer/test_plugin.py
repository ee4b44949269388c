"""What the plugin says of a machine, and what its user is told."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenyard.cli import run
from tokenyard.platform import Platform
from tokenyard_backends.flashinfer import plugin

(DESCRIPTOR,) = plugin.tokenyard_attention_backends()


class Machine(NamedTuple):
    """A machine on which all is there, unless said otherwise."""

    version: str | None = "0.7.4"
    capability: tuple[int, int] | None = (9, 0)
    programs: tuple[str, ...] = ("nvcc",)
    packages: tuple[str, ...] = ()

    def platform(self) -> Platform:
        machine = self

        class Fake(Platform):
            @property
            def compute_capability(self) -> tuple[int, int] | None:
                return machine.capability

            def package_version(self, distribution: str) -> str | None:
                return machine.version if distribution == "flashinfer-python" else None

            def has_program(self, name: str) -> bool:
                return name in machine.programs

            def has_package(self, import_name: str) -> bool:
                return import_name in machine.packages

        return Fake()


@pytest.fixture(autouse=True)
def _no_cuda_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setattr(plugin, "_DEFAULT_CUDA", tmp_path / "no-cuda")


def reasons(**changes: Any) -> list[str]:
    return list(DESCRIPTOR.requires(Machine()._replace(**changes).platform()))


def test_nothing_stands_in_the_way_where_all_is_there() -> None:
    assert reasons() == []


@pytest.mark.parametrize("version", ["0.7.0", "0.7.0.post1", "0.7.1", "0.7.2.post1", "0.7.4", "0.7.4+cu130"])
def test_every_checked_release_is_taken(version: str) -> None:
    assert reasons(version=version) == []


@pytest.mark.parametrize("version", ["0.6.9", "0.2.14", "0.7.5", "0.8.0", "1.0", "built at home"])
def test_other_releases_are_refused_with_the_range(version: str) -> None:
    assert reasons(version=version) == [
        f"flashinfer-python {version} is installed, and 0.7.0 to 0.7.4 are what it is written for"
    ]


def test_a_missing_package_is_told_with_the_command_that_brings_it() -> None:
    (reason,) = reasons(version=None)
    assert "flashinfer-python is not installed" in reason
    assert "pip install 'tokenyard[flashinfer]'" in reason


def test_a_gpu_is_needed_and_not_an_old_one() -> None:
    assert reasons(capability=None) == ["it needs an NVIDIA GPU, and torch sees none"]
    assert reasons(capability=(7, 5)) == ["it needs a GPU of compute capability 8.0 or later, and this one has 7.5"]
    assert reasons(capability=(8, 0)) == reasons(capability=(12, 0)) == []


def test_kernels_need_a_compiler_or_a_package_of_compiled_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (reason,) = reasons(programs=())
    assert "neither nvcc nor CUDA_HOME nor the package flashinfer-jit-cache" in reason
    assert reasons(programs=(), packages=("flashinfer_jit_cache",)) == []
    monkeypatch.setenv("CUDA_HOME", "/somewhere")
    assert reasons(programs=()) == []
    monkeypatch.delenv("CUDA_HOME")
    monkeypatch.setattr(plugin, "_DEFAULT_CUDA", tmp_path)
    assert reasons(programs=()) == []


def test_all_that_is_missing_is_told_at_once() -> None:
    assert len(reasons(version=None, capability=None, programs=())) == 3


def test_it_never_claims_to_have_run_on_a_device() -> None:
    assert DESCRIPTOR.tested_on == frozenset()


def test_listing_it_imports_neither_torch_nor_flashinfer() -> None:
    code = (
        "import sys; from tokenyard_backends.flashinfer import plugin; "
        "list(plugin.tokenyard_attention_backends()); "
        "sys.exit(any(name in sys.modules for name in ('torch', 'flashinfer', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def _no_gpu() -> None:
    if Platform().device_type == "cuda":
        pytest.skip("this machine has a GPU")


@pytest.mark.usefixtures("_no_gpu")
def test_without_a_gpu_it_says_what_is_missing_and_what_would_run(
    tiny_llama_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", "hi", str(tiny_llama_dir), "attention=flashinfer"]) == 2
    captured = capsys.readouterr()
    (line,) = captured.err.splitlines()
    assert "attention 'flashinfer' cannot run here: " in line
    assert "it needs an NVIDIA GPU, and torch sees none" in line
    assert "; here would run: " in line
    assert line.endswith("torch_native")
    assert captured.out == ""


@pytest.mark.usefixtures("_no_gpu")
def test_explain_tells_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["plugins", "explain", "flashinfer"]) == 0
    told = capsys.readouterr().out
    assert "attention 'flashinfer'" in told
    assert "unavailable" in told
    assert "it needs an NVIDIA GPU, and torch sees none" in told
