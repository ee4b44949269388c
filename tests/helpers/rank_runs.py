"""Runs of MultiprocExecutor with a tiny model, and what is left of one."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
from tokenyard.config import AttentionConfig, EngineConfig, ExecutorConfig, KVCacheConfig, ModelConfig, SchedulerConfig
from tokenyard.executor.multiproc import MultiprocExecutor
from tokenyard.interfaces import ExecutorContext, KVCachePlan
from tokenyard.sampling_params import SamplingParams
from tokenyard.scheduler_output import RequestStart, SchedulerOutput, Slot

PLAN = KVCachePlan(num_blocks=64, block_size=4)
NUM_DECODES = 120  # a request of these has room for them


def config_of(folder: Path, num_ranks: int) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(name=str(folder), dtype="float32", max_model_len=200),
        attention=AttentionConfig(name="torch_native"),
        executor=ExecutorConfig(name="multiproc", tensor_parallel_size=num_ranks, num_threads=1),
        kv_cache=KVCacheConfig(block_size=4, memory="16MiB"),
        scheduler=SchedulerConfig(max_num_seqs=4),
    )


@contextmanager
def running(
    folder: Path, num_ranks: int, *, allocates: bool = True, collective_timeout: float = 60.0
) -> Iterator[MultiprocExecutor]:
    """An executor that has its workers."""
    executor = MultiprocExecutor(ExecutorContext(steps_in_flight=2), collective_timeout=collective_timeout)
    try:
        executor.initialize(config_of(folder, num_ranks))
        if allocates:
            executor.allocate_kv_cache(PLAN)
        yield executor
    finally:
        executor.shutdown()


def step(number: int) -> SchedulerOutput:
    """Greedy decoding of one request: step 0 is a prefill of three tokens, each later one takes the token before it."""
    start = RequestStart(
        request_id="a",
        slot=Slot(0, 1),
        token_ids=np.array([5, 6, 7], dtype=np.int32),
        num_prompt_tokens=3,
        num_computed_tokens=0,
        block_ids=(np.arange(1, 2 + (3 + NUM_DECODES) // 4, dtype=np.int32),),
        params=SamplingParams(temperature=0),
    )
    return SchedulerOutput(
        step=number,
        new=() if number else (start,),
        slots=np.zeros(1, dtype=np.int64),
        generations=np.ones(1, dtype=np.int32),
        num_computed_tokens=np.array([2 + number if number else 0], dtype=np.int32),
        num_scheduled_tokens=np.array([1 if number else 3], dtype=np.int32),
        samples=np.ones(1, dtype=np.bool_),
    )


def impossible_step(number: int) -> SchedulerOutput:
    """A step of a slot that has no block."""
    return replace(step(number), new=(), slots=np.full(1, 3, dtype=np.int64))


def run_step(executor: MultiprocExecutor, output: SchedulerOutput) -> list[int]:
    executor.execute_model(output)
    token_ids: list[int] = executor.sample_tokens().result().token_ids.tolist()
    return token_ids


def run_steps(executor: MultiprocExecutor, end: int) -> None:
    """The steps from 1 on, one after the other."""
    for number in range(1, end):
        run_step(executor, step(number))


def wait_until(holds: Callable[[], bool], seconds: float = 20.0) -> bool:
    """A liveness deadline."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def are_gone(pids: list[int]) -> bool:
    return not any(psutil.pid_exists(pid) for pid in pids)
