"""When a part fails, the error names it: it may be a plugin's."""

from __future__ import annotations

import pytest
from tokenyard import ExecutorDescriptor, KVCacheManagerDescriptor
from tokenyard.config import EngineConfig, NoOptions
from tokenyard.errors import EngineDeadError, PluginError
from tokenyard.executor.inproc import InProcessExecutor
from tokenyard.interfaces import (
    Allocation,
    Executor,
    ExecutorContext,
    Hit,
    KVCacheManager,
    KVCacheManagerContext,
    KVCachePlan,
    KVRequest,
    WorkerReport,
)
from tokenyard.kv_cache import PagedKVCacheManager
from tokenyard.launch.assemble import build_engine
from tokenyard.launch.compose import load_engine_config
from tokenyard.testing import EngineHarness, catalogue_with


class Broken(PagedKVCacheManager):
    def allocate(
        self, request: KVRequest, num_tokens: int, hit: Hit | None = None, num_lookahead: int = 0
    ) -> Allocation | None:
        raise ZeroDivisionError("boom")


def make_broken(options: NoOptions, context: KVCacheManagerContext) -> KVCacheManager:
    return Broken(num_blocks=context.num_blocks, block_size=context.config.block_size)


@pytest.mark.parametrize("loop", ["sync", "overlap"])
def test_an_engine_that_died_names_the_part_and_method_it_died_of(loop: str) -> None:
    descriptor = KVCacheManagerDescriptor(name="broken", api_version=(1, 3), factory=make_broken)
    engine = EngineHarness(
        [f"engine={loop}", "kv_cache=broken", "kv_cache.num_blocks=10"], catalogue=catalogue_with(descriptor)
    )
    engine.add([1, 2, 3])
    with pytest.raises(EngineDeadError, match=r"in Broken\.allocate \(ZeroDivisionError: boom\)"):
        engine.step()
    engine.core.shutdown()


class BrokenStart(InProcessExecutor):
    method = ""

    def initialize(self, config: EngineConfig) -> WorkerReport:
        if self.method == "initialize":
            raise ZeroDivisionError("boom")
        return super().initialize(config)

    def allocate_kv_cache(self, plan: KVCachePlan) -> None:
        raise ZeroDivisionError("boom")


@pytest.mark.parametrize("method", ["initialize", "allocate_kv_cache"])
def test_an_executor_that_fails_at_the_start_is_named(method: str, tiny_llama_dir: object) -> None:
    def make(options: NoOptions, context: ExecutorContext) -> Executor:
        executor = BrokenStart(context)
        executor.method = method
        return executor

    catalogue = catalogue_with(ExecutorDescriptor(name="broken", api_version=(1, 3), factory=make))
    overrides = [f"model.name={tiny_llama_dir}", "executor=broken", "kv_cache.num_blocks=8"]
    config, _ = load_engine_config(overrides, catalogue=catalogue)
    with pytest.raises(PluginError, match=f"executor 'broken' failed in {method}: ZeroDivisionError: boom"):
        build_engine(config, catalogue)
