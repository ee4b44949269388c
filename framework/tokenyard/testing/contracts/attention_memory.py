"""Memory for caches of which only some pages are ever touched."""

from __future__ import annotations

import math
from pathlib import Path

import torch


def sparse_zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, folder: Path) -> torch.Tensor:
    """Zeros that cost memory where they are written or read only, from a sparse file in `folder`; on a GPU all of them.

    Raises OSError or RuntimeError where the machine cannot give so much.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    file = folder / f"cache{len(list(folder.iterdir()))}"
    size = math.prod(shape)
    with file.open("wb") as stream:
        stream.truncate(size * dtype.itemsize)
    return torch.from_file(str(file), shared=True, size=size, dtype=dtype).view(shape)
