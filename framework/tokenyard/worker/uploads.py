"""Small tensors of the host on a device, without the host waiting for what runs there."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    import numpy as np


def to_device(values: np.ndarray | torch.Tensor, device: torch.device) -> torch.Tensor:
    """On `device`; a copy from memory that is not page-locked would wait until all that runs on a GPU is done."""
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(values)
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
