"""`tokenyard bench scheduler`: from the settings to a row of figures for each size."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from tokenyard.bench.admit import AdmitCost, measure_admit
from tokenyard.bench.churn import ChurnCost, measure_churn
from tokenyard.bench.decode import MAX_TOKENS, STAGGER, DecodeCost, blocks_needed, decode_requests, measure_decode
from tokenyard.bench.headless import headless_scheduler
from tokenyard.bench.report import machine
from tokenyard.errors import CapacityError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from tokenyard.bench.settings import SchedulerBench
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.interfaces.scheduler import Scheduler

logger = logging.getLogger(__name__)

DECODE_BUDGET, ADMIT_BUDGET = 8192, 1 << 20
DECODE_BLOCKS, ADMIT_BLOCKS = 60_000, 200_000
MAX_MODEL_LEN = 8192
LEAST_TIMED_SHARE = 0.9
_UNUSED = ("model", "attention", "executor", "engine", "kv_cache.memory", "kv_cache.gpu_memory_utilization")
_USED = ("model.max_model_len", "engine.log_stats")


def default_overrides(settings: SchedulerBench, num_requests: int, given: Collection[str]) -> list[str]:
    """What the benchmark sets in place of the engine's own defaults; `given` are the keys that the user sets."""
    decodes = settings.mode != "admit"
    longest = settings.prompt + STAGGER + MAX_TOKENS
    values: Mapping[str, int] = {
        "scheduler.max_num_seqs": num_requests if decodes else 2 * num_requests,
        "scheduler.max_num_batched_tokens": max(
            DECODE_BUDGET if decodes else ADMIT_BUDGET,
            2 * num_requests + settings.prompt if decodes else num_requests * settings.prompt,
        ),
        "model.max_model_len": max(MAX_MODEL_LEN, longest),
        "kv_cache.num_blocks": DECODE_BLOCKS if decodes else ADMIT_BLOCKS,
    }
    return [f"{key}={value}" for key, value in values.items() if key not in given]


def warn_of_unused(given: Collection[str]) -> None:
    """Say which of the user's keys change nothing where no model runs."""
    unused = sorted(key for key in given if key.startswith(_UNUSED) and key not in _USED)
    if unused:
        logger.warning("bench scheduler runs no model, so this changes nothing: %s", ", ".join(unused))


def run_scheduler_bench(
    settings: SchedulerBench, num_requests: int, config: EngineConfig, catalogue: Catalogue, given: Collection[str]
) -> dict[str, object]:
    """Measure one size; `config` was composed with `default_overrides`. Raises UserError when it cannot be measured."""
    config = _with_enough_blocks(settings, num_requests, config, is_fixed="kv_cache.num_blocks" in given)
    facts = {"benchmark": "scheduler", "mode": settings.mode, "num_requests": num_requests}
    scheduler = headless_scheduler(config, catalogue)
    around = machine()
    if settings.mode != "admit":
        facts["num_steps"] = settings.steps
    cost = _measured(settings, num_requests, scheduler)
    return {**facts, "prompt_len": settings.prompt, **dataclasses.asdict(cost), **_names(config), **around}


def _measured(settings: SchedulerBench, num_requests: int, scheduler: Scheduler) -> AdmitCost | DecodeCost | ChurnCost:
    prompt_len = settings.prompt
    if settings.mode == "admit":
        return measure_admit(scheduler, num_requests, prompt_len)
    if settings.mode == "churn":
        return measure_churn(scheduler, num_requests, settings.waiting, prompt_len, settings.steps)
    cost = measure_decode(scheduler, decode_requests(num_requests + settings.waiting, prompt_len), settings.steps)
    if cost.timed_share < LEAST_TIMED_SHARE:
        logger.warning("only %.0f %% of the loop is the scheduler's: is the machine busy?", 100 * cost.timed_share)
    return cost


def _with_enough_blocks(
    settings: SchedulerBench, num_requests: int, config: EngineConfig, *, is_fixed: bool
) -> EngineConfig:
    """Large sizes and small blocks need more than the usual number; one that the user has set must do."""
    num_blocks = config.kv_cache.num_blocks
    if num_blocks is None:
        return config  # refused where the cache is made
    least, safe = _blocks(settings, num_requests, config)
    if not is_fixed:
        kv_cache = dataclasses.replace(config.kv_cache, num_blocks=max(num_blocks, safe))
        return dataclasses.replace(config, kv_cache=kv_cache)
    if num_blocks < least:
        raise CapacityError(
            f"kv_cache.num_blocks={num_blocks} is too few: {num_requests} requests of this benchmark hold {least} "
            f"blocks of {config.kv_cache.block_size} tokens; raise it, or lower bench.num_requests"
        )
    return config


def _blocks(settings: SchedulerBench, num_requests: int, config: EngineConfig) -> tuple[int, int]:
    """Blocks without which it cannot work, and with which it does."""
    block_size = config.kv_cache.block_size
    if settings.mode == "admit":
        least = num_requests * -(-(settings.prompt + 1) // block_size)
        return least, 2 * least  # the first round's blocks stay cached while the second is taken in
    at_once, budget = min(num_requests, config.scheduler.max_num_seqs), config.scheduler.max_num_batched_tokens
    # While the last ones are in prefill the first ones decode: half of all, on average, take from the budget.
    num_prefill_steps = -(-at_once * (settings.prompt + STAGGER) // max(1, budget - at_once // 2))
    return (
        blocks_needed(at_once, settings.prompt, settings.steps, block_size),
        blocks_needed(at_once, settings.prompt, settings.steps + num_prefill_steps, block_size),
    )


def _names(config: EngineConfig) -> dict[str, object]:
    policy = config.scheduler.policy
    return {
        "scheduler": config.scheduler.name,
        "policy": None if policy is None else policy.name,
        "kv_cache": config.kv_cache.name,
        "block_size": config.kv_cache.block_size,
        "prefix_caching": config.kv_cache.enable_prefix_caching,
    }
