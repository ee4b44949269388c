"""What this machine offers, found out on demand: listing plugins imports torch only when one asks for the device."""

from __future__ import annotations

import importlib.util
import shutil
from functools import cached_property
from importlib import metadata


class Platform:
    """Passed to a descriptor's `requires`."""

    @cached_property
    def device_type(self) -> str:
        """`cuda` where torch sees a GPU, else `cpu`. Imports torch."""
        import torch  # heavy, and most descriptors never ask

        return "cuda" if torch.cuda.is_available() else "cpu"

    @cached_property
    def compute_capability(self) -> tuple[int, int] | None:
        """Of the first GPU; None without one."""
        if self.device_type != "cuda":
            return None
        import torch

        major, minor = torch.cuda.get_device_capability()
        return major, minor

    def has_package(self, import_name: str) -> bool:
        """Whether a top-level package can be imported, without importing it."""
        return importlib.util.find_spec(import_name) is not None

    def package_version(self, distribution: str) -> str | None:
        """The installed version of a distribution, or None."""
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            return None

    def has_program(self, name: str) -> bool:
        """Whether an executable is on PATH."""
        return shutil.which(name) is not None
