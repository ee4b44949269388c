"""The suites, run on everything that ships."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenyard.testing import (
    EngineCoreContract,
    ExecutorContract,
    KVCacheManagerContract,
    ObserverContract,
    PolicyContract,
    SchedulerContract,
)


class TestFCFS(PolicyContract):
    overrides = ("scheduler=fcfs",)


class TestPriority(PolicyContract):
    overrides = ("scheduler=priority",)


class TestPriorityWithAgeing(PolicyContract):
    overrides = ("scheduler=priority", "scheduler.policy.ageing_seconds=60")


class TestBatch(SchedulerContract):
    overrides = ("scheduler=fcfs",)


class TestBatchWithPriority(SchedulerContract):
    overrides = ("scheduler=priority",)


class TestPaged(KVCacheManagerContract):
    overrides = ("kv_cache=paged",)
    swaps = True


class TestPagedFifo(KVCacheManagerContract):
    overrides = ("kv_cache=paged", "kv_cache.eviction=fifo")


class TestRadix(KVCacheManagerContract):
    overrides = ("kv_cache=radix",)


class TestPagedWithoutCaching(KVCacheManagerContract):
    overrides = ("kv_cache=paged", "kv_cache.enable_prefix_caching=false")
    shares_prefixes = False
    swaps = True


class TestPagedWithWindowGroups(KVCacheManagerContract):
    overrides = ("kv_cache=paged",)
    group_windows = (None, 6, 1)
    swaps = True


class TestPagedWithSeveralGroups(KVCacheManagerContract):
    overrides = ("kv_cache=paged",)
    group_windows = (None, None)
    swaps = True


class TestSync(EngineCoreContract):
    overrides = ("engine=sync",)


class TestOverlap(EngineCoreContract):
    overrides = ("engine=overlap",)


class TestInproc(ExecutorContract):
    @pytest.fixture(autouse=True)
    def _with_a_tiny_model(self, tiny_llama_dir: Path) -> None:
        self.overrides: Sequence[str] = (
            "executor=inproc",
            f"model.name={tiny_llama_dir}",
            "model.dtype=float32",
            "kv_cache.num_blocks=64",
            "kv_cache.block_size=4",
        )


class TestStepLogger(ObserverContract):
    overrides = ("observers=[step_logger]",)


class TestStepLoggerIntoAFile(ObserverContract):
    @pytest.fixture(autouse=True)
    def _with_a_file(self, tmp_path: Path) -> None:
        self.overrides: Sequence[str] = (f"observers=[{{name: step_logger, every: 3, path: '{tmp_path}/steps'}}]",)
