"""The host's arrays for a device, without waiting for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def for_upload(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """On the host, pinned where the device is a GPU: from other memory a copy would wait for all that it has to do.

    torch gives pinned memory to others only when the copies from it are done.
    """
    host = torch.from_numpy(values)
    return host.pin_memory() if device.type == "cuda" else host


def to_device(values: NDArray[np.generic], device: torch.device) -> torch.Tensor:
    """A copy on the device; on a CPU perhaps the array itself."""
    return for_upload(values, device).to(device, non_blocking=device.type == "cuda")
