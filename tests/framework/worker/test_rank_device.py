"""What a rank gets of a machine that it shares: threads, memory, a GPU of its own."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest
import torch
from thread_ranks import ThreadRanks
from tokenyard.config import KVCacheConfig
from tokenyard.errors import ConfigError
from tokenyard.model.ranks import ONE_RANK
from tokenyard.worker import device
from tokenyard.worker.device import available_kv_bytes, device_of_rank, set_threads, spare_address_space

CPU = torch.device("cpu")


@pytest.fixture
def _keeps_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_keeps_threads")
@pytest.mark.parametrize(("num_ranks", "expected"), [(1, 8), (2, 4), (3, 2), (16, 1)])
def test_by_default_ranks_share_the_physical_cores(
    num_ranks: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "physical_cores", lambda: 8)
    monkeypatch.setattr(device, "usable_cpus", lambda: set(range(16)))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert set_threads(None, num_ranks) == torch.get_num_threads() == expected
    assert set_threads(5, num_ranks) == 5  # a number in the config is each rank's


def test_ranks_share_the_memory_of_a_cpu_and_an_explicit_amount_is_each_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "free_ram", lambda: 8 * 2**30)
    assert [available_kv_bytes(KVCacheConfig(), CPU, ranks) for ranks in (1, 2, 4)] == [2**31, 2**30, 2**29]
    assert available_kv_bytes(KVCacheConfig(memory="64MiB"), CPU, 4) == 64 * 2**20


def test_the_default_cache_fits_what_the_process_may_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """2.3 #20: a limit of the address space is a limit of memory."""
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    monkeypatch.setattr(resource, "getrlimit", lambda which: unlimited)
    assert spare_address_space() is None
    monkeypatch.setattr(resource, "getrlimit", lambda which: (0, 0))
    assert spare_address_space() == 0
    assert available_kv_bytes(KVCacheConfig(), CPU) == 0


def ranks(rank: int, size: int) -> ThreadRanks:
    return ThreadRanks(None, rank, size)  # type: ignore[arg-type]  # they never meet


def test_each_rank_has_a_gpu_of_its_own_and_too_few_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert device_of_rank("auto", ranks(1, 2)) == torch.device("cuda", 1)
    assert chosen == [1]
    assert device_of_rank("cuda", ONE_RANK) == torch.device("cuda")
    with pytest.raises(ConfigError, match=r"executor.tensor_parallel_size=4: torch sees 2 GPU\(s\).* use 2 or fewer"):
        device_of_rank("auto", ranks(0, 4))


def test_on_a_cpu_ranks_share_the_device() -> None:
    assert device_of_rank("cpu", ranks(1, 2)) == CPU
