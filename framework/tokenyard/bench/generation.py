"""`tokenyard bench throughput` and `tokenyard bench latency`: a whole engine with its model, through LLM.generate."""

from __future__ import annotations

import itertools
import logging
import statistics
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, NamedTuple

import torch

import tokenyard
from tokenyard.bench.report import machine
from tokenyard.bench.token_times import TokenTimes
from tokenyard.bench.workload import Shape, prompts, warm_up
from tokenyard.errors import CapacityError, TokenyardError
from tokenyard.llm import LLM
from tokenyard.sampling_params import SamplingParams

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from tokenyard.bench.settings import LatencyBench, ThroughputBench
    from tokenyard.catalogue import Catalogue
    from tokenyard.config import EngineConfig
    from tokenyard.outputs import RequestOutput

logger = logging.getLogger(__name__)

_PERCENTILES = (10, 25, 50, 75, 90, 99)


def default_overrides(shapes: Sequence[Shape], given: Collection[str]) -> list[str]:
    """All requests of a shape run together unless the user says otherwise."""
    key, most = "scheduler.max_num_seqs", max(shape.num_requests for shape in shapes)
    return [] if key in given else [f"{key}={max(64, most)}"]


class _Run(NamedTuple):
    """One shape, run once."""

    seconds: float
    outputs: list[RequestOutput]

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens that the prefix cache saved."""
        return sum(output.num_cached_tokens for output in self.outputs)


def run_throughput_bench(
    settings: ThroughputBench, config: EngineConfig, catalogue: Catalogue
) -> list[dict[str, object]]:
    """A row for each shape: medians over rounds, in each of which every shape runs once, on an empty prefix cache."""
    shapes, around = settings.parsed, machine()
    with LLM.from_parts(config, catalogue) as llm:
        _check_lengths(llm, shapes)
        first = warm_up(llm.model_config.max_model_len)
        _generate(llm, first, settings.seed)
        runs: dict[Shape, list[_Run]] = {shape: [] for shape in shapes}
        for number in range(settings.num_rounds):
            for shape in shapes:
                logger.info("round %d of %d: %s", number + 1, settings.num_rounds, shape)
                runs[shape].append(_generate(llm, shape, settings.seed))
        facts = {**_facts(llm, config), "warm_up": str(first), **around}
    return [{"benchmark": "throughput", **_rates(shape, runs[shape]), **facts} for shape in shapes]


def run_latency_bench(settings: LatencyBench, config: EngineConfig, catalogue: Catalogue) -> dict[str, object]:
    """One batch again and again, each time on an empty prefix cache."""
    shape, around = settings.shape, machine()
    with LLM.from_parts(config, catalogue) as llm:
        _check_lengths(llm, [shape])
        logger.info("%d batches of %s to warm up", settings.num_iters_warmup, shape)
        for _ in range(settings.num_iters_warmup):
            _generate(llm, shape, settings.seed)
        times, runs = TokenTimes(llm.engine.core), []
        for number in range(settings.num_iters):
            logger.info("batch %d of %d: %s", number + 1, settings.num_iters, shape)
            runs.append(_generate(llm, shape, settings.seed))
        facts = _facts(llm, config)
    return {
        "benchmark": "latency",
        "batch_size": shape.num_requests,
        "input_len": shape.input_len,
        "output_len": shape.output_len,
        "num_iters_warmup": settings.num_iters_warmup,
        "num_iters": settings.num_iters,
        **_latencies([run.seconds for run in runs]),
        **_milliseconds("ttft", [_ttft(output) for run in runs for output in run.outputs]),
        **_milliseconds("itl", times.gaps),
        **facts,
        **around,
    }


def percentile(values: Sequence[float], share: int) -> float:
    """The smallest value that `share` per cent of them do not exceed (nearest rank)."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]


def _latencies(seconds: Sequence[float]) -> dict[str, object]:
    """In seconds, with the names of vLLM's benchmark."""
    return {
        "avg_latency": round(statistics.fmean(seconds), 4),
        "latencies": [round(one, 4) for one in seconds],
        "percentiles": {str(share): round(percentile(seconds, share), 4) for share in _PERCENTILES},
    }


def _milliseconds(name: str, seconds: Sequence[float]) -> dict[str, object]:
    """Mean, median and 99th percentile; None where there is nothing, as between the tokens of a single one."""
    figures = (statistics.fmean(seconds), statistics.median(seconds), percentile(seconds, 99)) if seconds else ()
    names = ("mean", "median", "p99")
    return {
        f"{figure}_{name}_ms": None if value is None else round(1000 * value, 3)
        for figure, value in itertools.zip_longest(names, figures)
    }


def _generate(llm: LLM, shape: Shape, seed: int) -> _Run:
    """Run a shape; what is in the prefix cache is forgotten first."""
    if not llm.reset_prefix_cache():
        raise TokenyardError("the prefix cache cannot be emptied: requests that have ended still hold blocks")
    tokens = prompts(shape, vocab_size=llm.model_config.vocab_size, seed=seed)
    params = SamplingParams(temperature=0.0, max_tokens=shape.output_len, ignore_eos=True)
    began = time.perf_counter()
    outputs = llm.generate(tokens, params, use_tqdm=False)
    seconds = time.perf_counter() - began
    short = [output for output in outputs if len(output.outputs[0].token_ids) != shape.output_len]
    if short:
        made, reason = len(short[0].outputs[0].token_ids), short[0].outputs[0].finish_reason
        raise CapacityError(
            f"{shape}: a request ended after {made} of {shape.output_len} tokens ({reason}); "
            "give the K/V cache more room with kv_cache.memory or kv_cache.num_blocks"
        )
    return _Run(seconds, outputs)


def _check_lengths(llm: LLM, shapes: Sequence[Shape]) -> None:
    limit = llm.model_config.max_model_len
    for shape in shapes:
        if shape.input_len + shape.output_len > limit:
            raise CapacityError(
                f"{shape}: {shape.input_len + shape.output_len} tokens a request, but the model takes {limit}; "
                "choose a smaller shape, or raise model.max_model_len if the model allows"
            )


def _rates(shape: Shape, runs: Sequence[_Run]) -> dict[str, object]:
    seconds = statistics.median(run.seconds for run in runs)
    num_output = shape.num_requests * shape.output_len
    return {
        "shape": str(shape),
        **asdict(shape),
        "output_tokens_per_s": round(num_output / seconds, 1),
        "total_tokens_per_s": round((num_output + shape.num_requests * shape.input_len) / seconds, 1),
        "requests_per_s": round(shape.num_requests / seconds, 3),
        "seconds": round(seconds, 4),
        "rounds_s": [round(run.seconds, 4) for run in runs],
        "num_cached_tokens": sum(run.num_cached_tokens for run in runs),  # 0, or the figures are of something else
    }


def _facts(llm: LLM, config: EngineConfig) -> dict[str, object]:
    report = llm.engine.report
    policy = config.scheduler.policy
    return {
        "model": llm.model_config.model,
        "decoder": report.decoder,
        "dtype": report.dtype,
        "device": report.device,
        "attention": report.attention_backend,
        "attention_description": report.attention_description,
        "engine": config.engine.name,
        "policy": None if policy is None else policy.name,
        "threads": torch.get_num_threads(),
        "tokenyard": tokenyard.__version__,
        "torch": torch.__version__,
    }


def _ttft(output: RequestOutput) -> float:
    """Seconds from arrival to the first token."""
    metrics = output.metrics
    if metrics is None or metrics.first_token_time is None:
        raise ValueError(f"request {output.request_id} has no first token")
    return metrics.first_token_time - metrics.arrival_time
