"""Accelerator: the parts of a worker that wait for a GPU's queue, record its graphs and ask for its memory.

Tests replace all three. What calls the driver besides are torch's tensors (small copies by `uploads.to_device` among
them), the choice of a device, and two readings: `Worker.memory_allocated` and `device.available_kv_bytes`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tokenyard.worker.device_memory import CudaMemory, DeviceMemory
from tokenyard.worker.graph_recorder import CudaGraphRecorder, GraphRecorder
from tokenyard.worker.stream import CudaCalls, DeviceStream, QueuedStream

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Accelerator:
    """One device's."""

    stream: DeviceStream
    recorder: GraphRecorder
    memory: DeviceMemory


def accelerator_of(device: torch.device) -> Accelerator | None:
    """None on a CPU, which the host is itself."""
    if device.type != "cuda":
        return None
    return Accelerator(
        stream=QueuedStream(device, CudaCalls()), recorder=CudaGraphRecorder(device), memory=CudaMemory(device)
    )
