"""MemoryProfile: how much of a GPU is left for the K/V cache, seen by running the largest step once."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from tokenyard.errors import CapacityError
from tokenyard.worker.device_memory import check_free, first_line, kv_cache_bytes, shares

if TYPE_CHECKING:
    from collections.abc import Callable

    from tokenyard.config import SchedulerConfig
    from tokenyard.worker.device_memory import DeviceMemory

logger = logging.getLogger(__name__)


class MemoryProfile:
    """Made before anything is loaded: what is in use then is not this engine's. Raises CapacityError, as below."""

    def __init__(self, memory: DeviceMemory, utilization: float) -> None:
        self._memory = memory
        memory.restart()
        self._start = memory.read()
        self._wanted = check_free(self._start, utilization)

    def kv_cache_bytes(self, run_largest_step: Callable[[], None], scheduler: SchedulerConfig, graph_rows: int) -> int:
        """Once the model is loaded; `graph_rows` are those of the largest CUDA graph that will be recorded."""
        self._memory.restart()
        loaded = self._memory.read()
        num_tokens, num_seqs = scheduler.max_num_batched_tokens, scheduler.max_num_seqs
        try:
            run_largest_step()
        except torch.OutOfMemoryError as error:
            raise CapacityError(
                f"a step of scheduler.max_num_batched_tokens={num_tokens} and scheduler.max_num_seqs={num_seqs} does "
                f"not fit in the GPU's memory, even without a K/V cache; lower them ({first_line(error)})"
            ) from error
        taken = shares(self._wanted, self._start, loaded, self._memory.read(), graph_rows / num_tokens)
        self._memory.restart()  # what the step needed is given back before the cache takes its place
        num_bytes = kv_cache_bytes(taken, max_num_batched_tokens=num_tokens, max_num_seqs=num_seqs)
        logger.info("GPU memory: %s", taken)
        return num_bytes
