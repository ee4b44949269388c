"""Accelerator: what a worker uses of a GPU besides tensors. Everything that calls a driver is behind these three."""

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
