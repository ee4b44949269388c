"""A GPU's memory: what is in use, and what of it the K/V cache may take."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from tokenyard.errors import CapacityError


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryReading:
    """Bytes of a GPU. `total` and `free` are the whole device's, the others what torch has in this process."""

    total: int
    free: int
    reserved: int  # taken from the device, in use or not
    allocated: int  # in use by tensors
    peak: int  # the most that was allocated since DeviceMemory.restart

    @property
    def outside(self) -> int:
        """In use, and not through torch in this process: other processes, the driver, libraries."""
        return max(0, self.total - self.free - self.reserved)


class DeviceMemory(ABC):
    """What a device says of its memory."""

    @abstractmethod
    def restart(self) -> None:
        """Give back what torch holds and does not use, and count the peak from here on."""

    @abstractmethod
    def read(self) -> MemoryReading:
        """Now, once all that was queued is done."""


class CudaMemory(DeviceMemory):
    """Of one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def restart(self) -> None:
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def read(self) -> MemoryReading:
        torch.cuda.synchronize(self._device)
        free, total = torch.cuda.mem_get_info(self._device)
        return MemoryReading(
            total=total,
            free=free,
            reserved=torch.cuda.memory_reserved(self._device),
            allocated=torch.cuda.memory_allocated(self._device),
            peak=torch.cuda.max_memory_allocated(self._device),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryShares:
    """Where a worker's share of a GPU's memory goes, in bytes."""

    wanted: int  # the share
    weights: int
    activations: int  # of the largest step
    graphs: int  # an estimate: CUDA graphs are recorded after the K/V cache is there
    outside: int  # what came into use outside torch since the start: libraries, or another process

    @property
    def kv_cache(self) -> int:
        """What is left; below 0 when the rest does not fit."""
        return self.wanted - self.weights - self.activations - self.graphs - self.outside

    def __str__(self) -> str:
        return (
            f"{_gib(self.wanted)} allowed: weights {_gib(self.weights)}, the largest step {_gib(self.activations)}, "
            f"CUDA graphs about {_gib(self.graphs)}, outside torch {_gib(self.outside)}, "
            f"K/V cache {_gib(self.kv_cache)}"
        )


def check_free(start: MemoryReading, utilization: float) -> int:
    """The bytes that `utilization` of a GPU are; CapacityError when others hold too much of it."""
    wanted = int(utilization * start.total)
    if start.free >= wanted:
        return wanted
    most = int(100 * start.free / start.total) / 100
    instead = f"lower it to {most} or less, or free memory" if most > 0 else "free memory"
    raise CapacityError(
        f"kv_cache.gpu_memory_utilization={utilization:g} asks for {_gib(wanted)} of the GPU's {_gib(start.total)}, "
        f"but only {_gib(start.free)} are free: {_gib(start.total - start.free)} were in use before the model was "
        "loaded, by other processes (see nvidia-smi), by other engines in this one and by the CUDA context; "
        f"{instead}"
    )


def shares(
    wanted: int, start: MemoryReading, loaded: MemoryReading, profiled: MemoryReading, graph_share: float
) -> MemoryShares:
    """From readings before the model was loaded, after it, and after the largest step.

    `graph_share` is the largest graph's number of rows as a share of that step's tokens: what a forward pass takes
    between its inputs and its result grows with its tokens, and graphs share the memory of the largest.
    """
    activations = max(0, profiled.peak - loaded.allocated)
    return MemoryShares(
        wanted=wanted,
        weights=max(0, loaded.allocated - start.allocated),
        activations=activations,
        graphs=int(activations * graph_share),
        outside=max(0, profiled.outside - start.outside),
    )


def kv_cache_bytes(taken: MemoryShares, *, max_num_batched_tokens: int, max_num_seqs: int) -> int:
    """What is left for the K/V cache; CapacityError with all the numbers when nothing is."""
    if taken.kv_cache > 0:
        return taken.kv_cache
    raise CapacityError(
        f"nothing is left for the K/V cache: of the {_gib(taken.wanted)} that kv_cache.gpu_memory_utilization allows, "
        f"the weights take {_gib(taken.weights)}, a step of scheduler.max_num_batched_tokens={max_num_batched_tokens} "
        f"and scheduler.max_num_seqs={max_num_seqs} {_gib(taken.activations)}, CUDA graphs about {_gib(taken.graphs)}, "
        f"and {_gib(taken.outside)} came into use outside torch (libraries, or another process); raise the first, or "
        "lower one of the other two"
    )


def first_line(error: BaseException) -> str:
    """What torch says, without the advice that follows."""
    return str(error).partition("\n")[0] or type(error).__name__


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"
