"""A scheduler and a K/V manager as a config composes them, with nobody to execute their steps."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from tokenyard.clock import MonotonicClock
from tokenyard.errors import ConfigError
from tokenyard.executor.simulated import report_without_model
from tokenyard.interfaces.executor import Executor
from tokenyard.launch.assemble import assemble_parts
from tokenyard.launch.cache_size import CacheSize, bytes_per_block
from tokenyard.launch.host_memory import host_blocks
from tokenyard.launch.steering import make_steering
from tokenyard.runner_output import ModelRunnerOutput

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.interfaces.executor import KVCachePlan
    from tokenyard.interfaces.scheduler import Scheduler
    from tokenyard.scheduler_output import SchedulerOutput

VOCAB_SIZE = 40000  # the prompts' token ids lie below it
SAMPLED_TOKEN = 5  # what every row of every step is said to have sampled

NULL_REPORT = report_without_model(VOCAB_SIZE)


class NullExecutor(Executor):
    """Stands where an engine expects an executor; it is never asked to run anything."""

    def initialize(self, config: EngineConfig) -> NoReturn:
        raise _nothing_runs()

    def allocate_kv_cache(self, plan: KVCachePlan) -> NoReturn:
        raise _nothing_runs()

    def execute_model(self, output: SchedulerOutput) -> NoReturn:
        raise _nothing_runs()

    def sample_tokens(self, grammar: object = None) -> NoReturn:
        raise _nothing_runs()

    def collective_rpc(self, name: str, arguments: Sequence[object] = ()) -> NoReturn:
        raise _nothing_runs()

    def check_health(self) -> None:
        """Nothing can have gone wrong."""

    def shutdown(self) -> None:
        """Nothing was started."""


def _nothing_runs() -> RuntimeError:
    return RuntimeError("a benchmark without a model asked its executor to run something")


def headless_scheduler(config: EngineConfig, catalogue: Catalogue) -> Scheduler:
    """The config's scheduler with its policy and its K/V manager; imports no torch. Raises ConfigError, PluginError."""
    size = _cache_size(config)
    parts = assemble_parts(
        config,
        catalogue,
        executor=NullExecutor(),
        report=NULL_REPORT,
        steering=make_steering(config, catalogue),
        clock=MonotonicClock(),
        size=size,
    )
    return parts.scheduler


def _cache_size(config: EngineConfig) -> CacheSize:
    num_blocks, max_model_len = config.kv_cache.num_blocks, config.model.max_model_len
    if num_blocks is None:
        raise ConfigError("kv_cache.num_blocks=null: without a model no memory says how many there are; give a number")
    if max_model_len is None or max_model_len < 0:
        shown = "null" if max_model_len is None else max_model_len
        raise ConfigError(f"model.max_model_len={shown}: this benchmark has no model to take it from; give a number")
    return CacheSize(num_blocks, max_model_len, host_blocks(config, bytes_per_block(config, NULL_REPORT)))


def sampled(output: SchedulerOutput) -> ModelRunnerOutput:
    """What an executor would return for a step: a token for each row that samples."""
    num_sampled = output.samples.astype(np.int32)
    token_ids = np.full(int(num_sampled.sum()), SAMPLED_TOKEN, dtype=np.int32)
    return ModelRunnerOutput(step=output.step, num_sampled=num_sampled, token_ids=token_ids)


def sampled_ahead(output: SchedulerOutput, num_steps: int) -> list[ModelRunnerOutput]:
    """The same for `num_steps` steps that are going to look like `output`, one sharing its arrays with the other."""
    first = sampled(output)
    return [dataclasses.replace(first, step=output.step + number) for number in range(1, num_steps + 1)]
