"""Launches of Triton kernels without a GPU: each is compiled exactly as for one, and its binary is kept for a look.

Triton's driver, the part that talks to a GPU, is replaced. What it would be asked is which chip there is; what it would
be given is the binary and the grid. Everything in between is Triton's own: which arguments are constants, which are
divisible by 16, which types they have.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import triton
from tokenyard_backends.triton import kernels
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

KERNELS = (kernels.write_kv_kernel, kernels.decode_kernel, kernels.merge_kernel, kernels.prompt_kernel)


@dataclass(frozen=True)
class Launch:
    """A kernel that would have run, and the grid."""

    grid: tuple[int, int, int]
    kernel: CompiledKernel

    @property
    def name(self) -> str:
        return str(self.kernel.metadata.name)

    @property
    def ptx(self) -> str:
        return str(self.kernel.asm["ptx"])

    @property
    def shared_memory(self) -> int:
        """Bytes, of one program."""
        return int(self.kernel.metadata.shared)

    @property
    def num_threads(self) -> int:
        return int(self.kernel.metadata.num_warps) * 32

    @cached_property
    def usage(self) -> dict[str, int]:
        """What the assembler gave each thread: REG registers, and bytes of STACK and LOCAL memory for what spilled."""
        with TemporaryDirectory() as folder:
            path = Path(folder, "kernel.cubin")
            path.write_bytes(self.kernel.asm["cubin"])
            told = subprocess.run(
                [triton.knobs.nvidia.cuobjdump.path, "-res-usage", str(path)],
                capture_output=True,
                text=True,
                check=True,
            ).stdout
        return {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", told)}

    @property
    def registers(self) -> int:
        return self.usage["REG"]

    @property
    def spilled(self) -> int:
        """Bytes a thread."""
        return self.usage["STACK"] + self.usage["LOCAL"]


class _Driver:
    """Answers for a chip that is not there."""

    def __init__(self, arch: int) -> None:
        self._arch = arch
        self.launches: list[Launch] = []
        self.utils = self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self._arch, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 1 << 30}  # the tests know better limits

    def load_binary(self, name: str, binary: bytes, shared: int, device: int) -> tuple[None, None, int, int, int]:
        return None, None, 0, 0, 1024

    def launcher_cls(self, source: object, metadata: object) -> Callable[..., None]:
        def launch(*arguments: Any) -> None:
            self.launches.append(Launch(arguments[:3], _compiled(metadata)))

        return launch


def _compiled(metadata: object) -> CompiledKernel:
    """The kernel that this metadata is of, from Triton's caches: the launcher is not given more."""
    caches = (kernel.device_caches[0][0] for kernel in KERNELS)
    return next(found for cache in caches for found in cache.values() if found.metadata is metadata)


@contextmanager
def dry_run(arch: int) -> Iterator[list[Launch]]:
    """Within it, launches of the backend's kernels come to the list; `arch` is 80 for sm_80, and so on."""
    stand_in = _Driver(arch)
    try:
        with mock.patch.object(driver, "_active", stand_in):
            yield stand_in.launches
    finally:
        for kernel in KERNELS:
            kernel.device_caches.clear()
