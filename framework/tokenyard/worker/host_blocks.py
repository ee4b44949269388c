"""HostBlocks: K/V blocks in host memory, and copies between them and the device."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenyard.errors import CapacityError, PluginError
from tokenyard.worker.device import free_ram
from tokenyard.worker.uploads import to_device

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tokenyard.arrays import IntArray
    from tokenyard.scheduler_output import HostTransfer
    from tokenyard.worker.stream import DeviceStream

logger = logging.getLogger(__name__)

_SLAB_BYTES = 64 * 2**20  # page-locked memory comes in powers of two: a block or less is lost for each
_STAGING_BYTES = 32 * 2**20  # on the device, beside the K/V cache


class HostBlocks:
    """`num_blocks` blocks with room for all that one id stands for on the device: K and V of a group's layers.

    A transfer gathers blocks into one staging buffer on the device and copies from there, or the other way round, so
    that a block is one copy between device and host, and neighbours are one together. All of it is queued in order
    behind what runs on the device; the host waits for nothing.
    """

    def __init__(
        self,
        num_blocks: int,
        kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
        num_layers: Sequence[int],
        stream: DeviceStream,
        *,
        slab_bytes: int = _SLAB_BYTES,
        staging_bytes: int = _STAGING_BYTES,
    ) -> None:
        """`kv_caches`: the tensors that groups share, blocks first; `num_layers`: how many of them each group uses."""
        self._stream = stream
        self._num_layers = num_layers
        rows = [cache.view(len(cache), -1) for pair in kv_caches for cache in pair]
        device, dtype, sizes = rows[0].device, rows[0].dtype, [row.shape[1] for row in rows]
        block_bytes = sum(sizes) * dtype.itemsize
        self._per_slab = max(1, slab_bytes // block_bytes)
        counts = [min(self._per_slab, num_blocks - start) for start in range(0, num_blocks, self._per_slab)]
        self._slabs = [stream.host_memory(count * block_bytes).view(count, block_bytes) for count in counts]
        num_staged = min(num_blocks, max(1, staging_bytes // block_bytes))
        self._staging = torch.empty((num_staged, block_bytes), dtype=torch.uint8, device=device)
        staged, ends = self._staging.view(dtype), np.cumsum(sizes).tolist()
        parts = [staged[:, end - size : end] for size, end in zip(sizes, ends, strict=True)]
        self._parts = list(zip(rows, parts, strict=True))  # a tensor's blocks, and their place in the staging buffer

    def transfer(self, transfers: Sequence[HostTransfer]) -> None:
        """Make copies, in order."""
        most = len(self._staging)
        for block_ids, host_block_ids, to_host, group in transfers:
            parts = self._parts[: 2 * self._num_layers[group]]
            for start in range(0, len(block_ids), most):
                ids = to_device(block_ids[start : start + most].astype(np.int64), self._staging.device)
                host_ids = host_block_ids[start : start + most]
                if to_host:
                    for blocks, part in parts:
                        part[: len(ids)] = blocks[ids]
                    self._copy(host_ids, to_host=True)
                else:
                    self._copy(host_ids, to_host=False)
                    for blocks, part in parts:
                        blocks[ids] = part[: len(ids)]

    def _copy(self, host_block_ids: IntArray, *, to_host: bool) -> None:
        """Between the first rows of the staging buffer and host memory."""
        for row, host_block_id, count in self._runs(host_block_ids):
            slab, first = divmod(host_block_id, self._per_slab)
            staged, host = self._staging[row : row + count], self._slabs[slab][first : first + count]
            self._stream.copy(*((host, staged) if to_host else (staged, host)))

    def _runs(self, host_block_ids: IntArray) -> Iterator[tuple[int, int, int]]:
        """(row, host block, count) of neighbours in one slab."""
        ends = np.flatnonzero((np.diff(host_block_ids) != 1) | (host_block_ids[1:] % self._per_slab == 0)) + 1
        row = 0
        for end in (*ends.tolist(), len(host_block_ids)):
            yield row, int(host_block_ids[row]), end - row
            row = end


def make_host_blocks(
    num_blocks: int,
    kv_caches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    num_layers: Sequence[int],
    stream: DeviceStream,
    *,
    num_ranks: int,
    backend_name: str,
    num_device_blocks: int,
) -> HostBlocks | None:
    """None for no blocks. Raises CapacityError where memory lacks, PluginError where the cache has another layout."""
    if not num_blocks:
        return None
    if any(cache.shape[0] != num_device_blocks for pair in kv_caches for cache in pair):
        raise PluginError(
            f"attention '{backend_name}' does not lay out its cache block by block, so none can be copied to "
            "kv_cache.host_memory; choose another attention backend, or leave out kv_cache.host_memory"
        )
    block_bytes = sum(cache[0].numel() * cache.itemsize for pair in kv_caches for cache in pair)
    needed = num_blocks * block_bytes * num_ranks
    where = f"{num_blocks} host blocks of {block_bytes} bytes" + (f" for each of {num_ranks} ranks" * (num_ranks > 1))
    if needed > (free := free_ram()):
        raise CapacityError(
            f"kv_cache.host_memory: {where} take {needed / 2**20:.0f} MiB, and this machine has {free / 2**20:.0f} MiB "
            "free; lower it"
        )
    try:
        return HostBlocks(num_blocks, kv_caches, num_layers, stream)
    except (RuntimeError, MemoryError) as error:
        raise CapacityError(
            f"kv_cache.host_memory: {where} do not fit in memory; lower it ({str(error).splitlines()[0]})"
        ) from error
