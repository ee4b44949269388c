"""What plugins ask of a machine, in one wording. Imports nothing heavy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenyard.platform import Platform


def gpu_reasons(platform: Platform, min_capability: tuple[int, int]) -> Iterator[str]:
    """Why there is no NVIDIA GPU of at least this compute capability; nothing = there is one."""
    capability = platform.compute_capability
    if capability is None:
        yield "it needs an NVIDIA GPU, and torch sees none"
    elif capability < min_capability:
        yield (
            f"it needs a GPU of compute capability {dotted(min_capability)} or later, and this one has "
            f"{dotted(capability)}"
        )


def release(version: str) -> tuple[int, ...]:
    """(3, 6, 0) of "3.6.0+git1234"; empty, so before every other, if it is no version."""
    from packaging.version import InvalidVersion, Version  # comes with transformers; needed only where it is installed

    try:
        return Version(version).release
    except InvalidVersion:
        return ()


def dotted(parts: Sequence[int]) -> str:
    return ".".join(map(str, parts))
