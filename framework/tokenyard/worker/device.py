"""Device, data type, threads and memory of a worker."""

from __future__ import annotations

import logging
import math
import os
import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from tokenyard.config import KVCacheConfig
from tokenyard.errors import ConfigError
from tokenyard.memory_size import parse_bytes

if TYPE_CHECKING:
    from tokenyard.model.ranks import RankGroup

logger = logging.getLogger(__name__)

_CPU_SHARE, _CPU_CAP = 4, 4 * 2**30  # a quarter of the free RAM, at most 4 GiB


def choose_device(name: str) -> torch.device:
    """`auto` is the first GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError("executor.device=cuda: torch sees no GPU here; use executor.device=cpu or auto")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def device_of_rank(name: str, ranks: RankGroup) -> torch.device:
    """A GPU of its own for each rank; a CPU is shared."""
    device = choose_device(name)
    if device.type != "cuda" or ranks.size == 1:
        return device
    if ranks.size > (count := torch.cuda.device_count()):
        raise ConfigError(
            f"executor.tensor_parallel_size={ranks.size}: torch sees {count} GPU(s), and each rank needs one of its "
            f"own; use {count} or fewer, or executor.device=cpu"
        )
    torch.cuda.set_device(ranks.rank)
    return torch.device(device.type, ranks.rank)


def choose_dtype(name: str, checkpoint: str) -> torch.dtype:
    """`auto` is the checkpoint's own type."""
    chosen = checkpoint if name == "auto" else name
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[chosen]


def set_threads(num_threads: int | None, num_ranks: int = 1) -> int:
    """CPU threads of torch in this process; OMP_NUM_THREADS, where set, is what torch has read already.

    By default ranks share the physical cores.

    Never more than the CPUs that this process may use: threads that take turns on one wait for each other in every
    operator. Whoever asked for more is told.
    """
    given = f"executor.num_threads={num_threads}"
    if num_threads is None:
        given = f"OMP_NUM_THREADS={(environment := os.environ.get('OMP_NUM_THREADS'))}"
        given_there = None if environment is None else max(torch.get_num_threads(), _count(environment))
        num_threads = max(1, physical_cores() // num_ranks) if given_there is None else given_there
    if num_threads > (most := len(usable_cpus())):
        logger.warning("%s: this process may use %d CPU(s), and gets as many threads", given, most)
        num_threads = most
    limit = _count(os.environ.get("OMP_THREAD_LIMIT", ""))
    if 0 < limit < num_threads:  # libraries that plan for more threads than they get compute garbage
        logger.warning(
            "OMP_THREAD_LIMIT=%d is below the %d threads of this worker, which gets %d", limit, num_threads, limit
        )
        num_threads = limit
    if num_threads != torch.get_num_threads():
        torch.set_num_threads(num_threads)
    return torch.get_num_threads()


def _count(text: str) -> int:
    """A variable of OpenMP as one number; 0 for a list, which torch reads in its own way, and for none."""
    return int(text) if text.strip().isdecimal() else 0


def usable_cpus() -> set[int]:
    """Logical CPUs that this process may use."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))


def physical_cores() -> int:
    """Physical cores that this process may use: two threads of one core do not speed up linear algebra."""
    cores = set()
    for cpu in usable_cpus():
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
        cores.add(siblings.read_text().strip() if siblings.is_file() else str(cpu))
    return max(1, len(cores))


def available_kv_bytes(config: KVCacheConfig, device: torch.device, num_ranks: int = 1) -> int:
    """Bytes for one rank's K/V cache, once the model is loaded. A GPU's are profiled, unless the config says the size.

    Ranks on a CPU share its memory; a size in the config is that of each.
    """
    if config.memory is not None:
        return parse_bytes(config.memory)
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(config.gpu_memory_utilization * total) - (total - free))
    if config.gpu_memory_utilization != KVCacheConfig().gpu_memory_utilization:
        logger.warning("kv_cache.gpu_memory_utilization=%s is not used on a CPU", config.gpu_memory_utilization)
    return min(free_ram() // _CPU_SHARE, _CPU_CAP) // num_ranks


def num_bytes_of(dtype: str) -> int:
    """Of one number of a torch type."""
    torch_dtype: torch.dtype = getattr(torch, dtype)
    return torch_dtype.itemsize


def zeros(shape: tuple[int, ...], dtype: str, device: torch.device) -> torch.Tensor:
    """A tensor of zeros; on a CPU its pages cost nothing before they are written.

    torch.zeros writes every page: 4 GiB took 11 s at start, for blocks that few runs ever use.
    """
    torch_dtype: torch.dtype = getattr(torch, dtype)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=torch_dtype, device=device)
    num_bytes = math.prod(shape) * torch_dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(torch_dtype).view(shape)


def spare_address_space() -> int | None:
    """Bytes that this process may still map (RLIMIT_AS); None = no limit, or nobody says."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    statm = Path("/proc/self/statm")
    if limit == resource.RLIM_INFINITY or not statm.is_file():
        return None
    return max(0, limit - int(statm.read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE"))


def free_ram() -> int:
    """Free and reclaimable RAM in bytes, within the limits of the control group and of this process."""
    free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        found = re.search(r"^MemAvailable:\s+(\d+) kB", meminfo.read_text(), re.MULTILINE)
        free = int(found[1]) * 1024 if found else free
    limit = Path("/sys/fs/cgroup/memory.max")
    used = Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and (text := limit.read_text().strip()).isdigit():
        free = min(free, max(0, int(text) - int(used.read_text())))
    spare = spare_address_space()
    return free if spare is None else min(free, spare)
