"""Which CUDA graphs a worker records at its start, and the errors of recording them in one line."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

import torch

from tokenyard.errors import CapacityError, PluginError
from tokenyard.worker.decode_graphs import default_sizes
from tokenyard.worker.device_memory import first_line

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.config import EngineConfig
    from tokenyard.interfaces.attention import AttentionBackend
    from tokenyard.model.causal_lm import CausalLM
    from tokenyard.worker.accelerator import Accelerator
    from tokenyard.worker.model_runner import ModelRunner

logger = logging.getLogger(__name__)


def graph_sizes(
    config: EngineConfig, accelerator: Accelerator | None, model: CausalLM, backend: AttentionBackend, backend_name: str
) -> tuple[int, ...]:
    """Numbers of rows for which decoding is recorded; () where it is not, with the reason in the log."""
    executor = config.executor
    if accelerator is None:
        if executor.cudagraph_capture_sizes is not None:
            logger.warning("executor.cudagraph_capture_sizes is not used on a CPU")
        return ()
    reasons = [
        *(["executor.enforce_eager=true"] if executor.enforce_eager else []),
        *(["several ranks share the model"] if executor.tensor_parallel_size > 1 else []),
        *([] if model.can_record else [f"the {model.description} may wait for the GPU"]),
        *([] if backend.can_capture else [f"attention '{backend_name}' cannot be recorded"]),
    ]
    if reasons:
        logger.info("no CUDA graphs: %s", "; ".join(reasons))
        return ()
    sizes = executor.cudagraph_capture_sizes
    return default_sizes(config.scheduler.max_num_seqs) if sizes is None else tuple(sorted(set(sizes)))


def record_graphs(
    runner: ModelRunner, accelerator: Accelerator, sizes: Sequence[int], max_seq_len: int, backend_name: str
) -> None:
    """Record, and tell how long that took and what it needs. Raises CapacityError, PluginError."""
    free, started = accelerator.memory.read().free, time.perf_counter()
    try:
        runner.record_graphs(accelerator.recorder, sizes, max_seq_len)
    except RuntimeError as error:
        raise _why_not_recorded(_root(error), backend_name) from error
    took, taken = time.perf_counter() - started, (free - accelerator.memory.read().free) / 2**20
    logger.info("%d CUDA graphs of up to %d rows: %.1f s, %.0f MiB", len(sizes), max(sizes), took, taken)


def _root(error: BaseException) -> BaseException:
    """What failed first: torch ends a recording that failed, which raises another error in its place."""
    while (before := error.__cause__ or (None if error.__suppress_context__ else error.__context__)) is not None:
        error = before
    return error


def _why_not_recorded(error: BaseException, backend_name: str) -> CapacityError | PluginError:
    if isinstance(error, torch.OutOfMemoryError):
        return CapacityError(
            f"CUDA graphs do not fit beside the K/V cache ({first_line(error)}); lower "
            "kv_cache.gpu_memory_utilization or executor.cudagraph_capture_sizes, or set executor.enforce_eager=true"
        )
    return PluginError(
        f"attention '{backend_name}' could not be recorded in a CUDA graph ({first_line(error)}); "
        "set executor.enforce_eager=true"
    )
