"""Device, data type, memory and threads of a worker."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from tokenyard.config import KVCacheConfig
from tokenyard.errors import ConfigError
from tokenyard.memory_size import parse_bytes
from tokenyard.worker import device
from tokenyard.worker.device import available_kv_bytes, choose_device, choose_dtype, physical_cores, set_threads, zeros

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (4096, 4096),
        ("4096", 4096),
        ("512MiB", 512 * 2**20),
        ("512 mib", 512 * 2**20),
        ("2GB", 2 * 10**9),
        ("1.5GiB", 3 * 2**29),
        ("3k", 3000),
        ("1TiB", 2**40),
    ],
)
def test_memory_is_read_as_people_write_it(text: str | int, expected: int) -> None:
    assert parse_bytes(text) == expected


@pytest.mark.parametrize("text", ["", "much", "-1", 0, "0GB", "1PB", "1 2 GB", "nan", "1e3"])
def test_what_is_no_amount_of_memory_is_refused(text: str | int) -> None:
    with pytest.raises(ConfigError, match=r"kv_cache\.memory"):
        parse_bytes(text)


def test_the_cpus_share_is_capped_and_an_explicit_amount_wins() -> None:
    assert 0 < available_kv_bytes(KVCacheConfig(), CPU) <= 4 * 2**30
    assert available_kv_bytes(KVCacheConfig(memory="64MiB"), CPU) == 64 * 2**20


def test_auto_takes_the_checkpoints_type_and_a_name_wins() -> None:
    assert choose_dtype("auto", "bfloat16") is torch.bfloat16
    assert choose_dtype("float32", "bfloat16") is torch.float32


@pytest.mark.skipif(torch.cuda.is_available(), reason="only where there is no GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    assert choose_device("auto") == CPU
    with pytest.raises(ConfigError, match=r"executor\.device=cuda"):
        choose_device("cuda")


@pytest.fixture
def num_threads() -> Iterator[int]:
    """torch's threads, which are what they were when the test has ended."""
    before = torch.get_num_threads()
    yield before
    torch.set_num_threads(before)


def may_use(num_cpus: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "usable_cpus", lambda: set(range(num_cpus)))


@pytest.mark.parametrize("wanted", [1, 3, 4])
def test_torch_gets_the_threads_that_are_asked_for(
    num_threads: int, wanted: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    may_use(4, monkeypatch)
    assert set_threads(wanted) == wanted == torch.get_num_threads()
    assert caplog.messages == []


def test_without_a_number_the_environment_decides_and_else_the_cores(
    num_threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_use(8, monkeypatch)
    torch.set_num_threads(3)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert set_threads(None) == torch.get_num_threads() == 3  # torch has read the variable already
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert set_threads(None) == torch.get_num_threads() == physical_cores()


@pytest.mark.parametrize(
    ("wanted", "environment", "named"),
    [(64, None, "executor.num_threads=64"), (None, "64", "OMP_NUM_THREADS=64"), (64, "1", "executor.num_threads=64")],
)
def test_more_threads_than_cpus_become_as_many_as_cpus_with_one_warning(
    num_threads: int,
    wanted: int | None,
    environment: str | None,
    named: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    may_use(2, monkeypatch)
    if environment is None:
        monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    else:
        monkeypatch.setenv("OMP_NUM_THREADS", environment)
    assert set_threads(wanted) == torch.get_num_threads() == 2
    assert caplog.messages == [f"{named}: this process may use 2 CPU(s), and gets as many threads"]


def test_the_limit_of_openmp_is_kept_and_told(
    num_threads: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """With fewer threads than they planned for, oneDNN's products are garbage."""
    may_use(4, monkeypatch)
    monkeypatch.setenv("OMP_THREAD_LIMIT", "2")
    assert set_threads(3) == torch.get_num_threads() == 2
    assert caplog.messages == ["OMP_THREAD_LIMIT=2 is below the 3 threads of this worker, which gets 2"]
    assert set_threads(1) == 1
    assert len(caplog.messages) == 1


def test_a_list_of_thread_counts_is_left_to_torch(num_threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    may_use(4, monkeypatch)
    torch.set_num_threads(2)
    monkeypatch.setenv("OMP_NUM_THREADS", "64,4")
    assert set_threads(None) == 2


def test_there_is_at_least_one_core() -> None:
    assert physical_cores() >= 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_zeros_are_zeros_of_the_shape_and_can_be_written(dtype: str) -> None:
    made = zeros((3, 4, 2), dtype, CPU)
    assert (made.shape, made.dtype) == ((3, 4, 2), getattr(torch, dtype))
    assert not made.any()
    made[1] = 2
    assert made.float().sum() == 16
